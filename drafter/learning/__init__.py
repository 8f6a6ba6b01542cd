"""A head that learns from the rows of a job while the job runs: rows in, versions of a head out."""
