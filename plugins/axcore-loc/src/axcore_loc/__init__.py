"""LoC-complexity: the lines that a feature costs in existing modules."""
