"""Attentions: each differs from all others in heads, mask, logits, kernel or output."""
