"""One decoding step: its stages on the device, how the host runs them, and what it is told."""
