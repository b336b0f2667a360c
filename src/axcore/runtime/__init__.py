"""Processes of one run: what they tell each other, signals, exit codes."""
