"""Methods beside the core. Each is a package that registers itself by its `METHOD` and can be deleted."""
