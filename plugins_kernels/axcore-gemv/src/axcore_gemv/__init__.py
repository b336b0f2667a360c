"""Products of one row with a large matrix, for decoding on NVIDIA GPUs."""
