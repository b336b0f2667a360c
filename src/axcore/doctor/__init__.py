"""Examines the installation, and installed plugins in separate processes, for `axcore doctor`."""
