"""Attention: what a kernel is asked, the kernels, how one is chosen, and the layers that attend.

`axcore.nn` exports it.
"""
