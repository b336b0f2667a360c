"""Attentions that differ in heads, mask, logits, kernel or output."""
