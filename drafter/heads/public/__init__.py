"""Draft heads in the layouts that others publish them in: read from them, and written in them."""
