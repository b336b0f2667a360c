"""Reading a mask as the flags of a fused kernel: causal, a window, and documents."""

from __future__ import annotations

import dataclasses
from typing import Literal

from axcore.nn.attention.masks import And, Causal, Full, Mask, SameSegment, SlidingWindow
from axcore.nn.attention.request import KernelRequest


@dataclasses.dataclass(frozen=True)
class MaskForm:
    """A conjunction of `Full`, `Causal`, `SlidingWindow` and `SameSegment`.

    Attributes:
        causal: whether a query sees no later key.
        window: a query sees keys at most `window - 1` places away; None: at any distance.
        documents: whether a query sees only keys of its own document.
    """

    causal: bool
    window: int | None
    documents: bool

    @classmethod
    def of(cls, mask: Mask) -> MaskForm | None:
        """The form of a mask; None if it contains another kind of mask."""
        parts = mask.masks if type(mask) is And else (mask,)
        if not all(type(part) in (Full, Causal, SlidingWindow, SameSegment) for part in parts):
            return None
        return cls(
            causal=any(isinstance(part, Causal) for part in parts),
            window=min((part.size for part in parts if isinstance(part, SlidingWindow)), default=None),
            documents=any(isinstance(part, SameSegment) for part in parts),
        )


def mask_refusal(
    request: KernelRequest,
    *,
    windows: Literal["any", "causal", "none"] = "causal",
    documents: Literal["any", "aligned", "none"] = "aligned",
) -> str | None:
    """Why a kernel does not support the mask of a request; None if it does.

    The kernel must support full attention and causal masks in which query i sees keys 0 to i.

    Args:
        windows: the sliding windows that the kernel supports: any, only those that are also causal, or none.
        documents: the packed rows that the kernel supports: any, only those whose queries and keys are the same tokens,
            or none.
    """
    form = MaskForm.of(request.mask)
    apart = form is not None and form.documents and request.packed
    if form is None or not _has_window(form, windows) or (apart and documents == "none"):
        supported = ["full attention", "causal masks"]
        supported += {"any": ["windows"], "causal": ["causal windows"], "none": []}[windows]
        supported += [] if documents == "none" else ["documents"]
        found = f"{request.mask!r} on packed rows" if apart else repr(request.mask)
        return f"supports {', '.join(supported[:-1])} and {supported[-1]}, not {found}"
    if request.aligned or not (form.causal or form.window is not None or (apart and documents == "aligned")):
        return None
    return (
        f"requires queries and keys of the same tokens for {request.mask!r}, got {request.query_len} queries and "
        f"{request.key_len} keys of different tokens"
    )


def _has_window(form: MaskForm, windows: str) -> bool:
    return form.window is None or windows == "any" or (windows == "causal" and form.causal)
