"""What a plugin can offer: a name, a line about it, and where the code is. Naming it imports nothing."""

from __future__ import annotations

import dataclasses
import fnmatch
from typing import ClassVar


@dataclasses.dataclass(frozen=True)
class Offer:
    """One thing that a plugin offers.

    Attributes:
        name: what configs and users call it; unique among offers of its kind.
        target: `package.module:attribute`, imported when a config names the offer and not before.
        summary: one line for listings.
    """

    kind: ClassVar[str] = "offer"
    slot: ClassVar[str] = ""
    """The config field that it fills, for kinds that `use` can put into place; empty for the others."""
    name: str
    target: str
    summary: str


class Feature(Offer):
    """A modifier `use(cfg, **options) -> cfg` that attaches something to a config: RoPE, MoE, LoRA, FP8."""

    kind = "feature"


class AttentionKernel(Offer):
    """A Layer class for the kernel slot of attention: a subclass of `axcore.nn.AttentionKernel`."""

    kind = "attention kernel"
    slot = "kernel"


class KVCache(Offer):
    """A Layer class for the cache slot of attention, a subclass of `axcore.nn.KVCache`; it owns its layout."""

    kind = "kv cache"
    slot = "cache"


class NumericsOffer(Offer):
    """A subclass of `axcore.numerics.Numerics`, for the numerics slot of layers with a weight."""

    kind = "numerics"
    slot = "numerics"


class Optimizer(Offer):
    """A subclass of `axcore.train.Optimizer`, for the optimizer slot of the learner."""

    kind = "optimizer"
    slot = "optimizer"


class InputSource(Offer):
    """A class that reads documents for the source slot of an input: a subclass of `axcore.train.data.TextSource`."""

    kind = "input source"
    slot = "source"


class CheckpointFormat(Offer):
    """A class that writes and reads training states, for the format slot of the checkpointer."""

    kind = "checkpoint format"
    slot = "format"


@dataclasses.dataclass(frozen=True)
class MeshRule(Offer):
    """A modifier for one kind of hardware.

    Attributes:
        pattern: which accelerators it is for, as in `gpu-h100-*`.
    """

    kind: ClassVar[str] = "mesh rule"
    pattern: str

    def matches(self, accelerator: str) -> bool:
        return fnmatch.fnmatchcase(accelerator, self.pattern)


class Recipe(Offer):
    """A function without required arguments that returns a whole trainer config."""

    kind = "recipe"


class Command(Offer):
    """A subcommand of `axcore`: a function that takes the arguments after its name and returns an exit code."""

    kind = "command"
