"""Products of few rows with a large matrix, for decoding on NVIDIA GPUs."""
