"""Mamba-2 for axcore (Dao and Gu 2024, arXiv 2405.21060)."""
