"""Mesh rules for axcore: CPUs, TPUs, NVIDIA GPUs and Trainium."""
