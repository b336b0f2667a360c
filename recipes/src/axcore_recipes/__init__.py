"""Models, recipes and mesh rules for axcore."""
