"""C++ code for CPUs: its compilation and bindings."""
