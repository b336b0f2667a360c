"""Checkpoints, weights to start from, model folders."""
