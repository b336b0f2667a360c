"""Mixtures of experts for axcore."""
