"""Flash attention by AWS's NKI kernels for axcore."""
