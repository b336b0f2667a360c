"""Callbacks that observe a run: metric writers, progress, evaluation and saving."""
