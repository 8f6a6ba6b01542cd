"""Our own C++ code for CPUs: how it is compiled and called."""
