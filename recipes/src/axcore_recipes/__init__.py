"""Models and recipes for axcore."""
