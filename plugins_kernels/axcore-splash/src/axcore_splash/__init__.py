"""Splash attention for axcore."""
