"""How far back a mask lets a query see."""

from __future__ import annotations

from axcore.nn import And, Mask, Or, SlidingWindow


def reach(mask: Mask) -> int | None:
    """The number of places back to the first key that a query may see, its own included; None: no limit."""
    if isinstance(mask, SlidingWindow):
        return mask.size
    if isinstance(mask, And):
        return min((each for each in map(reach, mask.masks) if each is not None), default=None)
    if isinstance(mask, Or):
        each = [found for found in map(reach, mask.masks) if found is not None]
        return max(each) if len(each) == len(mask.masks) else None
    return None
