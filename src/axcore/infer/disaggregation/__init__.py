"""Prompts that one engine computes and another continues, in one process or in two."""
