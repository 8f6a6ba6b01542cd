"""Which tests notice a fault of one line: `faults.yaml` lists faults, and `python -m studies.mutants` applies each."""
