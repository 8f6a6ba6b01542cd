"""What speaks HTTP: routes, keys, limits, the page; it holds no model."""
