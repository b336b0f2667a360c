"""The config tree: immutable typed nodes, selection, pure edits, a text form and overrides.

This package imports neither jax nor flax.
"""

from axcore.config.codec import Codec, register, register_codec
from axcore.config.errors import AxcoreError, ConfigError, MissingError, did_you_mean, under
from axcore.config.frozen import FrozenDict
from axcore.config.history import acting
from axcore.config.memory import OutOfMemory, allocating
from axcore.config.modifier import Modifier, pipe
from axcore.config.node import REQUIRED, Config, Configurable, has_field, known_types, shown_type, type_name
from axcore.config.override import override
from axcore.config.ranges import (
    AnyInt,
    FiniteFloat,
    Fraction,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Range,
    Seed,
)
from axcore.config.select import Where, select, tagged
from axcore.config.serial import content_hash, from_json, to_json
from axcore.config.text import Diff, diff, diff_flat, flatten, parse_text, text
from axcore.config.tree import get, matches, put, walk
from axcore.config.types import parse

__all__ = [
    "REQUIRED",
    "AnyInt",
    "AxcoreError",
    "Codec",
    "Config",
    "ConfigError",
    "Configurable",
    "Diff",
    "FiniteFloat",
    "Fraction",
    "FrozenDict",
    "MissingError",
    "Modifier",
    "NonNegativeFloat",
    "NonNegativeInt",
    "OutOfMemory",
    "PositiveFloat",
    "PositiveInt",
    "Range",
    "Seed",
    "Where",
    "acting",
    "allocating",
    "content_hash",
    "did_you_mean",
    "diff",
    "diff_flat",
    "flatten",
    "from_json",
    "get",
    "has_field",
    "known_types",
    "matches",
    "override",
    "parse",
    "parse_text",
    "pipe",
    "put",
    "register",
    "register_codec",
    "select",
    "shown_type",
    "tagged",
    "text",
    "to_json",
    "type_name",
    "under",
    "walk",
]


def __dir__() -> list[str]:
    return __all__
