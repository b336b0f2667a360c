"""Attention for decoding from KV caches in place, on NVIDIA GPUs."""
