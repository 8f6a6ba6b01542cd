"""This engine beside other engines on this machine: each in an environment and a process of its own."""
