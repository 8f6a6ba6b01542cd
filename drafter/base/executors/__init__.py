"""Ways to run the base's forward."""
