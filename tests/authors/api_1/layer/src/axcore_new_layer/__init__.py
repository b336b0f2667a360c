"""A learned sigmoid gate on the output of each attention head, for axcore."""
