"""minGRU in place of attention, for axcore."""
