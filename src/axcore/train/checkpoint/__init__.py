"""Checkpoints, initial weights and model folders."""
