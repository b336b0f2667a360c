"""FSDP with tensor parallelism over pairs of GPUs, for axcore."""
