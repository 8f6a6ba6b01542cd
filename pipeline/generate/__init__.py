"""The generation job: from its configuration to the streaming execution on the cluster."""
