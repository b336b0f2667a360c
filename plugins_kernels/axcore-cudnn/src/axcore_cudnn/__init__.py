"""cuDNN attention for axcore."""
