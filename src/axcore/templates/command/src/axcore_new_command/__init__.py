"""A command that counts the parameters of a recipe, for axcore."""
