"""Guided decoding by regular expressions, JSON schemas, choices and context-free grammars, with llguidance."""
