"""Models that differ in depth, width, structure, numerics or loss."""
