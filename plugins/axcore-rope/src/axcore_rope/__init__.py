"""Rotary position embedding for axcore."""
