"""Examines installed plugins in separate processes, for `axcore doctor`."""
