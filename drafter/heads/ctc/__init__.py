"""The CTC head: frames that are read by CTC, or as a lattice that knows the last labels."""
