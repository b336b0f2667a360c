"""The config tree: immutable typed nodes, selection, pure edits, text form, overrides. Imports neither jax nor flax."""

from axcore.config.errors import AxcoreError, ConfigError, did_you_mean
from axcore.config.modifier import Modifier, pipe
from axcore.config.node import REQUIRED, Config, Configurable, FrozenDict, has_field, type_name
from axcore.config.override import override
from axcore.config.select import Selection, Where, select
from axcore.config.text import Change, Diff, diff, diff_flat, flatten, parse_text, text
from axcore.config.tree import get, put, walk

__all__ = [
    "REQUIRED",
    "AxcoreError",
    "Change",
    "Config",
    "ConfigError",
    "Configurable",
    "Diff",
    "FrozenDict",
    "Modifier",
    "Selection",
    "Where",
    "did_you_mean",
    "diff",
    "diff_flat",
    "flatten",
    "get",
    "has_field",
    "override",
    "parse_text",
    "pipe",
    "put",
    "select",
    "text",
    "type_name",
    "walk",
]
