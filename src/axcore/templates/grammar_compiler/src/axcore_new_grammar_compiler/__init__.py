"""Guided decoding by choices, for engines of axcore."""
