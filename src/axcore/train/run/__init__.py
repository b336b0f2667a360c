"""A run: the trainer, its loop, its length, its folder."""
