"""A training run: the trainer, its loop, its length and its folder."""
