"""Attention: inputs of kernels, masks, kernels and their choice, and attention layers. `axcore.nn` exports it."""
