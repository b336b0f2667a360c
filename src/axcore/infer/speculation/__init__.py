"""Speculative decoding: drafts of the next tokens, which the model verifies in one step."""

from axcore.infer.speculation.draft_model import DraftModel
from axcore.infer.speculation.drafter import Drafter, Drafts, Target
from axcore.infer.speculation.hidden_states import keeping_hidden_states
from axcore.infer.speculation.model_drafter import ModelDrafter
from axcore.infer.speculation.mtp import MTP
from axcore.infer.speculation.ngram import NGram

__all__ = ["MTP", "DraftModel", "Drafter", "Drafts", "ModelDrafter", "NGram", "Target", "keeping_hidden_states"]


def __dir__() -> list[str]:
    return __all__
