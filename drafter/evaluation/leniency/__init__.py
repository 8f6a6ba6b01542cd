"""What verifiers that accept more than equality gain, and what they cost in quality."""
