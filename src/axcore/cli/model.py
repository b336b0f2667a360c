"""The arguments of commands that run a model with its weights."""

from __future__ import annotations

import argparse
import math
import os
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from axcore.cli.compose import add_edits, compose, is_folder
from axcore.config import AxcoreError, Config, ConfigError
from axcore.plugin import (
    AdaptersOffer,
    DrafterOffer,
    GrammarCompilerOffer,
    KVCacheOffer,
    Offer,
    PluginError,
    offered,
    registry,
)

if TYPE_CHECKING:
    from axcore.infer import Adapters, Engine, Grammar, GrammarCompiler
    from axcore.infer.loading import LoadedModel
    from axcore.infer.speculation import Drafter
    from axcore.nn import KVCache
    from axcore.parallel import Layout

type Parser = argparse.ArgumentParser | argparse._ArgumentGroup
"""What takes arguments."""
STEP_TOKENS, CPU_STEP_TOKENS = 512, 64
"""The default of `--step-tokens`. A CPU has no idle arithmetic, so more tokens only delay those of other samples."""
AXES = ("data", "fsdp", "expert", "tensor")
"""The mesh axes that decoding supports."""


def add_model(parser: argparse.ArgumentParser, *, without: str = "") -> None:
    """Adds the model, `--dtype`, `--cache`, `--mesh`, `--use` and `--set`.

    Args:
        without: what `--cache none` does, for a command that supports it.
    """
    parser.add_argument("model", help="a folder, or a recipe that `axcore recipes` lists")
    parser.add_argument("--dtype", help="dtype of parameters and activations, such as bfloat16 (default: the model's)")
    parser.add_argument(
        "--cache",
        metavar="CACHE[:KEY=VALUE,...]",
        help=f"KV cache of every layer: one that `axcore plugins` lists{without} (default: the caches of the model, "
        f"and contiguous in layers without one)",
    )
    parser.add_argument(
        "--mesh",
        metavar="AXIS=SIZE[,...]",
        help="devices over which the model and its caches are sharded, such as tensor=4 or expert=4,tensor=2; axes: "
        "data, fsdp, expert and tensor, as in training (default: one device)",
    )
    add_edits(parser, target=False)


def chosen_layout(arguments: argparse.Namespace) -> Layout | None:
    """The layout for `--mesh`, on the first devices, with the standard rules; None: a single device.

    Raises:
        AxcoreError: an axis or a size is not valid, or there are too few devices.
    """
    if arguments.mesh is None:
        return None
    shape: dict[str, int] = {}
    for part in arguments.mesh.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in shape or not (size.isascii() and size.isdigit() and int(size) > 0):
            raise AxcoreError(
                f"--mesh {arguments.mesh}: {part!r} is not AXIS=SIZE with a new axis of {', '.join(AXES)} and a "
                f"positive number of devices. Write it as in tensor=2 or expert=4,tensor=2"
            )
        shape[axis] = int(size)

    import jax

    from axcore.parallel import Mesh

    count, devices = math.prod(shape.values()), jax.devices()
    if count > len(devices):
        remedy = f". Set the environment variable JAX_NUM_CPU_DEVICES={count}" if jax.default_backend() == "cpu" else ""
        raise AxcoreError(
            f"--mesh {arguments.mesh} requires {count} devices, but there are {len(devices)} ({devices[0].device_kind})"
            f"{remedy}"
        )
    return Mesh(shape=shape).make(devices[:count])


def add_speculation(parser: Parser) -> None:
    """Adds `--speculation`."""
    parser.add_argument(
        "--speculation",
        metavar="DRAFTER[:KEY=VALUE,...]",
        help="what proposes tokens that the model verifies several at a time: ngram, "
        "draft-model:model=FOLDER_OR_RECIPE, or another one that `axcore plugins` lists (default: nothing)",
    )


def chosen_drafter(arguments: argparse.Namespace) -> Drafter.Config | None:
    """The config of the drafter for `--speculation`."""
    if arguments.speculation is None:
        return None
    return cast("Drafter.Config", offered(DrafterOffer, arguments.speculation))


def chosen_offer(kind: type[Offer], text: str | None, flag: str, package: str) -> Config:
    """The config of an offer: the one that a flag names, or the only one that is installed.

    Args:
        kind: the kind of offers.
        text: the value of the flag; None: it was not given.
        flag: the flag, for messages.
        package: a distribution that offers one, for messages.

    Raises:
        PluginError: the flag is not given and no plugin, or several, offer one; or none offers what it names.
        ConfigError: the text has another form, or a value does not fit.
    """
    if text is None:
        names = sorted({offer.name for _, offer in registry().offers(kind)})
        if not names:
            raise PluginError(f"{flag}: no installed plugin offers {kind.kind}. pip install {package}")
        if len(names) > 1:
            raise PluginError(f"{flag}: several are installed: {', '.join(names)}. Choose one, as in {flag} {names[0]}")
        (text,) = names
    return offered(kind, text)


def add_adapters(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds `--adapter` and `--adapters`.

    Args:
        text: the help of `--adapter`.
    """
    parser.add_argument("--adapter", metavar="NAME=FOLDER", action="append", default=[], help=text)
    parser.add_argument(
        "--adapters",
        metavar="ADAPTERS[:KEY=VALUE,...]",
        help="room for adapters: one of the adapters that `axcore plugins` lists (default: the only one that is "
        "installed, if there is an --adapter)",
    )


def chosen_adapters(arguments: argparse.Namespace) -> tuple[dict[str, str], Adapters.Config | None]:
    """The folders of `--adapter`, by name, and the room for adapters; None: neither flag is given.

    Raises:
        AxcoreError: an `--adapter` has another form, or two have the same name.
        PluginError: see `chosen_offer`.
    """
    folders: dict[str, str] = {}
    for text in arguments.adapter:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder):
            raise AxcoreError(f"--adapter {text}: must have the form NAME=FOLDER, such as sql=runs/sql")
        if name in folders:
            raise AxcoreError(f"--adapter {text}: another --adapter has the name {name!r}. Choose names that differ")
        folders[name] = folder
    if not folders and arguments.adapters is None:
        return folders, None
    room = chosen_offer(AdaptersOffer, arguments.adapters, "--adapters", "axcore-lora")
    return folders, cast("Adapters.Config", room)


def add_guide(parser: argparse.ArgumentParser) -> None:
    """Adds `--regex`, `--json-schema`, `--choice`, `--grammar` and `--grammars`."""
    group = parser.add_argument_group("guided decoding", "what the output must match (at most one)")
    group.add_argument("--regex", metavar="PATTERN", help="a regular expression that the whole output matches")
    group.add_argument("--json-schema", metavar="FILE", help="a JSON schema; the output is JSON that it accepts")
    group.add_argument("--choice", metavar="TEXT", action="append", help="one of several texts; repeat it for each")
    group.add_argument("--grammar", metavar="FILE", help="the rules of a context-free grammar, in Lark or GBNF")
    add_grammars(group)


def add_grammars(parser: Parser) -> None:
    """Adds `--grammars`."""
    parser.add_argument(
        "--grammars",
        metavar="NAME[:KEY=VALUE,...]",
        help="grammar compiler: one that `axcore plugins` lists (default: the only one that is installed)",
    )


def chosen_grammar(arguments: argparse.Namespace) -> Grammar | None:
    """The grammar that the flags of `add_guide` describe; None: any output.

    Raises:
        AxcoreError: two flags are given, a file cannot be read, a grammar is not valid, or `--grammars` has no effect.
    """
    from axcore.infer import Grammar

    makers = {
        "--regex": (arguments.regex, Grammar.regex),
        "--json-schema": (arguments.json_schema, lambda file: Grammar.json_schema(read_text(file, "--json-schema"))),
        "--choice": (arguments.choice, Grammar.choice),
        "--grammar": (arguments.grammar, lambda file: Grammar.rules(read_text(file, "--grammar"))),
    }
    given = [flag for flag, (value, _) in makers.items() if value is not None]
    if not given:
        if arguments.grammars is not None:
            raise AxcoreError(f"--grammars {arguments.grammars} has no effect without one of {', '.join(makers)}")
        return None
    if len(given) > 1:
        raise AxcoreError(f"{' and '.join(given)} exclude each other. Give one of them")
    value, make = makers[given[0]]
    try:
        return make(value)
    except ConfigError as error:
        raise ConfigError(f"{given[0]}: {error}") from error


def chosen_grammars(arguments: argparse.Namespace) -> GrammarCompiler.Config:
    """The config of the compiler for `--grammars`.

    Raises:
        PluginError: see `chosen_offer`.
    """
    made = chosen_offer(GrammarCompilerOffer, arguments.grammars, "--grammars", "axcore-guided")
    return cast("GrammarCompiler.Config", made)


def read_text(file: str, flag: str) -> str:
    """The contents of the file that a flag names.

    Raises:
        AxcoreError: it cannot be read.
    """
    try:
        return pathlib.Path(os.path.expanduser(file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise AxcoreError(f"{flag} {file}: {error}. Give the path of a text file") from error


def chosen_cache(arguments: argparse.Namespace) -> KVCache.Config:
    """The config of the cache for `--cache`, which fills empty slots."""
    from axcore.nn import ContiguousCache

    if arguments.cache is None:
        return ContiguousCache.Config()
    return cast("KVCache.Config", offered(KVCacheOffer, arguments.cache))


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Adds `--max-len` and the other fields of `Engine.Config` that change the attention calls of an engine."""
    group = parser.add_argument_group("engine", "also the attention calls of an engine on one device")
    group.add_argument(
        "--max-len", type=int, metavar="TOKENS", help="maximum number of tokens of a row; required by the others"
    )
    group.add_argument("--max-rows", type=int, help="maximum number of rows that decode together (default: 8)")
    add_step_sizes(group, str(STEP_TOKENS))
    group.add_argument("--cache", metavar="CACHE[:KEY=VALUE,...]", help="KV cache (default: contiguous)")
    add_speculation(group)


def add_step_sizes(parser: Parser, default: str = f"{STEP_TOKENS}, on CPUs {CPU_STEP_TOKENS}") -> None:
    """Adds `--step-tokens` and `--burst-tokens`, see `Engine.Config`.

    Args:
        default: the default of `--step-tokens`.
    """
    parser.add_argument(
        "--step-tokens", type=int, help=f"maximum number of prompt tokens of a step (default: {default})"
    )
    parser.add_argument(
        "--burst-tokens",
        type=int,
        help="maximum number of prompt tokens of a step during a burst of prompts, which begins when more than twice "
        "as many wait, and for which rows that decode wait; above --step-tokens; requires a cache with pages (default: "
        "--step-tokens always applies)",
    )


def chosen_step_tokens(arguments: argparse.Namespace) -> int:
    """The value of `--step-tokens`, or the default for the backend of jax."""
    import jax

    if arguments.step_tokens is not None:
        return int(arguments.step_tokens)
    return CPU_STEP_TOKENS if jax.default_backend() == "cpu" else STEP_TOKENS


def chosen_engine(arguments: argparse.Namespace) -> Engine.Config | None:
    """The config of the engine that the flags of `add_engine` describe; None without any.

    Raises:
        AxcoreError: a flag has no effect without `--max-len`.
    """
    names = "max_rows", "step_tokens", "burst_tokens", "cache", "speculation"
    given = {name: value for name in names if (value := getattr(arguments, name)) is not None}
    if arguments.max_len is None:
        for name in given:
            raise AxcoreError(f"--{name.replace('_', '-')} describes an engine, which also requires --max-len")
        return None
    from axcore.infer import Engine

    given |= {"cache": chosen_cache(arguments), "speculation": chosen_drafter(arguments)}
    return Engine.Config(max_len=arguments.max_len, **given)


def loaded_model(arguments: argparse.Namespace, *, weights: bool = True, layout: Layout | None = None) -> LoadedModel:
    """The model with its weights, and its tokenizer.

    Args:
        weights: whether a recipe without weights is an error. If not, they are random.
        layout: how the weights are sharded.
    """
    from axcore.infer.loading import load_model

    name, dtype, keep_caches = arguments.model, arguments.dtype, arguments.cache is None
    if is_folder(name):
        if arguments.edits:
            raise AxcoreError(_not_editable(name, arguments.edits))
        return load_model(name, dtype=dtype, keep_caches=keep_caches, layout=layout)
    try:
        trainer = compose(name, arguments.edits)
    except PluginError as error:
        raise PluginError(f"{name!r} is not a model folder and cannot be composed as a recipe: {error}") from error
    return load_model(trainer, name=name, dtype=dtype, keep_caches=keep_caches, weights=weights, layout=layout)


def _not_editable(folder: str, edits: Sequence[tuple[str, str]]) -> str:
    """Why the model in a folder takes no edits, and how to choose a KV cache."""
    given = ", ".join(f"--{kind} {text}" for kind, text in edits)
    message = f"{folder}: {given} would edit a recipe, but the model in a folder is used as it is."
    names = {offer.name for _, offer in registry().offers(KVCacheOffer)}
    caches = [text for kind, text in edits if kind == "use" and text.partition(":")[0] in names]
    return f"{message} To choose a KV cache: --cache {caches[0]}" if caches else f"{message} Omit it."
