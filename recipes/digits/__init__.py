"""A small model that sees: it reads sheets with handwritten digits, adds them up and says where they are."""
