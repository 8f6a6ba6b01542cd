"""What an engine's drafter remembers of rows that other processes have decoded: earlier ones, and those beside it."""
