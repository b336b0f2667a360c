"""Cross-layer attention for axcore."""
