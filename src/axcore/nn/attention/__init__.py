"""Attention: inputs of kernels, masks, kernels and their choice, and attention layers. Exported by `axcore.nn`."""
