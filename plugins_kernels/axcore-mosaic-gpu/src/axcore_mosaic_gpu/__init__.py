"""Pallas Mosaic-GPU kernels for axcore on Hopper GPUs."""
