"""A callback that ends a run that no longer improves, for axcore."""
