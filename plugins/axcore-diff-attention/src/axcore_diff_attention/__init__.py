"""Differential attention for axcore."""
