"""Grouped matrix products of one block of rows after another, for axcore."""
