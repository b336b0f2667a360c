"""A sliding window."""

from axcore.nn import Attention, Causal, SameSegment, SlidingWindow


def attention() -> Attention.Config:
    return Attention.Config(num_heads=4, mask=Causal() & SameSegment() & SlidingWindow(size=5))
