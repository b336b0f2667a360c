"""Speculative decoding: drafts of the next tokens, which the model verifies in one step."""

from axcore.infer.speculation.draft_model import DraftModel
from axcore.infer.speculation.drafter import Drafter, Drafts, Target
from axcore.infer.speculation.ngram import NGram

__all__ = ["DraftModel", "Drafter", "Drafts", "NGram", "Target"]


def __dir__() -> list[str]:
    return __all__
