"""INT8 and INT4 numerics for axcore."""
