"""transformers checkpoints and GGUF files for axcore."""
