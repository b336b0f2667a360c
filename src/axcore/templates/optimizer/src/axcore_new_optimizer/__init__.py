"""The optimizer Lion, for axcore."""
