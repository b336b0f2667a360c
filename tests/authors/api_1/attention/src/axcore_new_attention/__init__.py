"""Attention over blocks of keys with an online softmax, for axcore."""
