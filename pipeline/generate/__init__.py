"""The generation job: its configuration, its checks, and the pipeline from staged parts to committed ones."""
