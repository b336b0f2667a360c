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
    name: str
    target: str
    summary: str


class Feature(Offer):
    """A modifier `use(cfg, **options) -> cfg` that attaches something to a config: RoPE, MoE, LoRA, FP8."""

    kind = "feature"


class AttentionKernel(Offer):
    """A Layer class for the kernel slot of attention, called as `axcore.nn.ReferenceKernel` is."""

    kind = "attention kernel"


class KVCache(Offer):
    """A Layer class for the cache slot of attention; it owns its layout."""

    kind = "kv cache"


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
