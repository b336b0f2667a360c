"""FP8 training and inference for axcore."""
