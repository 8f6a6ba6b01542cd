"""What runs in the measured processes: a module for each engine, and the lines that they speak."""
