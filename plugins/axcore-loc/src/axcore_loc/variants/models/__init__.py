"""Models: each differs from all others in depth, width, structure, numerics or loss."""
