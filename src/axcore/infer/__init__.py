"""Inference: sampling from a trained model."""

from axcore.infer.generate import generate

__all__ = ["generate"]
