"""The folder of a job's results: committed parts, run.json, the lease, compaction."""
