"""Explanations of a config: the supplier of each node, and the candidates for each slot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray, PyTree

import axcore
from axcore.aot.chips import device_kind
from axcore.aot.decoding import cache_in, engine_choices
from axcore.config import Config, has_field, type_name, walk
from axcore.config.node import fields
from axcore.config.tree import get, join
from axcore.config.types import conforms, hints
from axcore.infer import Engine
from axcore.module import Layer, Rngs, abstract
from axcore.nn import AttentionKernel, GroupedMatmul, KernelRequest, Repeat, TunableKernel, refusal
from axcore.nn.attention.choice import ChooseKernel
from axcore.nn.choosing import Choice, recording
from axcore.nn.grouped_choice import FirstSupported
from axcore.parallel import Layout, Mesh
from axcore.plugin import Accelerator, Offer, Plugin, active, mesh_rules, recipe_of, registry, supplier
from axcore.plugin.offers import OFFERS, KVCacheOffer
from axcore.plugin.slots import accepts, config_type
from axcore.train import CrossEntropy
from axcore.train.data.form import batch_form

CORE = f"axcore {axcore.__version__}"
WIDTH, MIN_COLUMN = 120, 40
"""Columns of the text, and the smallest width of its last column."""
_SUPPLIER = re.compile(r" of [\w-]+ [\w.+-]+(?=\(|$)")
"""The distribution in the description of an edit, such as ` of axcore-rope 0.1.0`."""


@dataclasses.dataclass(frozen=True)
class Node:
    """One node of a config.

    Attributes:
        kind: The class that the node builds.
        supplier: The distribution that provides the class.
        by: What set the node, such as a recipe or a feature; empty if it is the default of its parent.
    """

    path: str
    kind: str
    supplier: str
    by: str


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A class that could fill a slot.

    Attributes:
        name: The name of the offer, or the name of the class if no plugin offers it.
        verdict: `chosen`, or why the candidate is not chosen.
    """

    name: str
    supplier: str
    verdict: str


@dataclasses.dataclass(frozen=True)
class Slot:
    """Config fields that offers of one kind can fill. Fields with the same candidates and verdicts form one slot.

    Attributes:
        kind: The kind of the offers.
        paths: The config paths of the fields.
        request: The request that a kernel or grouped product must support; empty for other kinds of slots.
        layers: The number of layers with this request; 0 for other kinds of slots.
    """

    kind: str
    paths: tuple[str, ...]
    request: str
    candidates: tuple[Candidate, ...]
    layers: int = 0


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The result of `explain`. Its text is a set of tables; `to_json` has the same content.

    Attributes:
        target: The accelerator and its mesh rule; empty for this machine.
        empty: The paths of empty fields that features may fill.
        problems: An error message for each attention that no kernel supports, and for each mixture of experts that no
            grouped product supports. Training would raise it.
    """

    platform: str
    target: str
    plugins: Mapping[str, str]
    nodes: tuple[Node, ...]
    slots: tuple[Slot, ...]
    empty: tuple[str, ...]
    problems: tuple[str, ...] = ()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2)

    def __str__(self) -> str:
        plugins = ", ".join(self.plugins.values()) or "none"
        lines = [f"platform: {self.platform}{self.target and f' ({self.target})'}", f"active plugins: {plugins}", ""]
        # Versions are in the line of plugins, and the supplier of a feature is that of the node or of the mesh rule.
        rows = [
            (node.path or "(root)", node.kind, node.supplier.partition(" ")[0], _SUPPLIER.sub("", node.by))
            for node in self.nodes
        ]
        lines += _table(("node", "builds", "from", "set by"), rows)
        for slot in self.slots:
            lines += ["", *_lines(slot)]
        if self.empty:
            parents: dict[str, list[str]] = {}
            for path in self.empty:
                parent, _, name = path.rpartition(".")
                parents.setdefault(name, []).append(parent or "(root)")
            lines += ["", "empty slots, which features may fill:"]
            lines += _table((), [(f"  {name}", ", ".join(found)) for name, found in parents.items()])
        return "\n".join(lines)


def _lines(slot: Slot) -> Iterator[str]:
    """A slot as text: its path, the request, and its candidates with the chosen one first."""
    where = slot.paths[0] if len(slot.paths) == 1 else f"{slot.paths[0]} and {len(slot.paths) - 1} more"
    where += f", {slot.layers} layer{'s' * (slot.layers > 1)}" if slot.layers else ""
    yield f"{slot.kind}: {where}"
    if slot.request:
        yield from _table((), [("  call:", slot.request)])
    listed = sorted(slot.candidates, key=lambda each: not each.verdict.startswith("chosen"))
    rows = [(f"  {each.name}", each.supplier, each.verdict) for each in listed]
    yield from _table((), rows) or ["  (no installed plugin offers one)"]


def explain(cfg: Config, target: str | None = None, engine: Engine.Config | None = None) -> Explanation:
    """Explains where each node of a config comes from, and why each candidate for a slot is chosen or not.

    The model is traced to find the kernels that it chooses. Nothing is computed.

    Args:
        cfg: The config of a trainer or of a model.
        target: The accelerator of the config, as in `gpu-h100-8`; by default this machine.
        engine: An engine on one device, whose attention calls are explained, too; None: only calls of training.
    """
    platform, rule, layout = jax.default_backend(), "", layout_for(cfg, target)
    if target is not None:
        accelerator = Accelerator.parse(target)
        platform = accelerator.backend
        rules = mesh_rules(accelerator, recipe_of(cfg))
        rule = target + "".join(f", mesh rule {rule.name} of {plugin}" for plugin, rule in rules[:1])
    choices = choices_of(cfg, layout, engine)
    nodes = [_node(path, node) for path, node in walk(cfg) if node.target is not None]
    slots = [slot for kind in OFFERS.values() if kind.slot for slot in _slots(cfg, kind, choices, engine)]
    listed = {path for slot in slots for path in slot.paths}
    empty = [path for path in _empty(cfg) if path not in listed]
    problems = dict.fromkeys(problem for each in choices.values() for choice in each if (problem := choice.problem()))
    plugins = {"core": CORE} | active(cfg)
    return Explanation(platform, rule, plugins, tuple(nodes), tuple(slots), tuple(empty), tuple(problems))


def _empty(cfg: Config) -> Iterator[str]:
    for path, node in walk(cfg):
        for name, value in fields(node):
            if value is None and conforms(Layer.Config(), hints(type(node)).get(name)):
                yield join(path, name)


def layout_for(cfg: Config, target: str | None) -> Layout | None:
    """The layout of a config on an accelerator that need not exist; None without a target."""
    if target is None:
        return None
    accelerator = Accelerator.parse(target)
    mesh, count = (get(cfg, "mesh"), accelerator.count) if has_field(cfg, "mesh") else (Mesh(), 1)
    found: Layout = mesh.abstract(count, accelerator.backend, device_kind(accelerator))
    return found


def choices_of(
    cfg: Any, layout: Layout | None, engine: Engine.Config | None = None
) -> dict[str, list[Choice]]:  # Any: the config of a trainer or of a model
    """The choices in each slot for a kernel or a grouped product, by its path in the config: those of training, and
    those of the attention calls of an engine, if one is given."""
    whole = has_field(cfg, "model")
    model, prefix = (cfg.model, "model") if whole else (cfg, "")
    if not hasattr(model.target, "predictions"):
        return {}
    objective = (cfg.objective if whole else CrossEntropy.Config()).build()
    if whole:
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((leaf.shape[0] // cfg.microbatches, *leaf.shape[1:]), leaf.dtype),
            batch_form(cfg.input),
        )
    else:
        ids = jax.ShapeDtypeStruct((1, 128), jnp.int32)
        batch = {"inputs": ids, "targets": ids, "weights": jax.ShapeDtypeStruct(ids.shape, jnp.float32)}
    fn, params, state = abstract(model, prefix)

    def loss(params: PyTree, state: PyTree, batch: PyTree, key: PRNGKeyArray) -> PyTree:
        return objective.value(fn, params, state, batch, key=key, training=True)

    key = jax.eval_shape(lambda: jax.random.key(0))
    active_layout = layout.active() if layout is not None else contextlib.nullcontext()
    with active_layout, recording() as found:
        jax.eval_shape(loss, params, state, batch, key)
    # A layer that runs several times, such as under remat, makes equal choices.
    by_path = {_config_path(choice.path, prefix): [choice] for choice in found}
    for choice in [] if engine is None else engine_choices(model, engine, _one_device(layout)):
        if isinstance(choice.requests[0], KernelRequest):
            by_path.setdefault(_config_path(choice.path, prefix), []).append(choice)
    return by_path


def _one_device(layout: Layout | None) -> Layout | None:
    """A layout of one device of the same kind."""
    return None if layout is None else Mesh().abstract(1, layout.platform, layout.device_kind)


def _config_path(path: str, prefix: str) -> str:
    """The config path of a frame, which has no segments for scanned layers."""
    below = ".".join(name for name in path.split(".") if name != "*")
    return join(prefix, below) if prefix else below


def _node(path: str, node: Config) -> Node:
    events = node.history()
    made = next((event.actor for event in events if event.action == "made"), "python")
    outer, _, inner = made.rpartition(" > ")
    # A mesh rule says more than the features that it uses, unlike a recipe.
    by = outer.partition(" > ")[0].partition("(")[0] if outer.startswith("target:") else inner
    return Node(path, type_name(type(node)).rpartition(".")[2], _name(supplier(node)), "" if by == "python" else by)


def _slots(
    cfg: Config, kind: type[Offer], choices: Mapping[str, list[Choice]], engine: Engine.Config | None
) -> Iterator[Slot]:
    """The slots for one kind of offers, grouped by their verdicts. An engine fills the cache slots that are empty."""
    groups: dict[tuple[str, tuple[Candidate, ...]], list[str]] = {}
    for path, node in walk(cfg):
        if not has_field(node, kind.slot) or not isinstance(value := getattr(node, kind.slot), Config | Mapping | None):
            continue
        if not _takes(node, kind):  # a field of the same name with another type
            continue
        if value is None and engine is not None and kind is KVCacheOffer:
            value = cache_in(path.removeprefix("model."), engine)
        where = join(path, kind.slot)
        for choice in choices.get(where, (None,)):
            candidates = tuple(_candidates(kind, value, choice))
            request = choice.described if choice is not None else ""
            groups.setdefault((request, candidates), []).append(where)
    for (request, candidates), paths in groups.items():
        layers = sum(_layers(cfg, path) for path in paths) if request else 0
        yield Slot(kind.kind, tuple(paths), request, candidates, layers)


def _takes(node: Config, kind: type[Offer]) -> bool:
    for plugin, offer in registry().offers(kind):
        try:
            new = config_type(plugin, offer)()
        except Exception:  # a broken offer may be for this slot
            return True
        if accepts(node, kind.slot, {offer.name: new} if kind.keyed else new):
            return True
    return False


def _layers(cfg: Config, path: str) -> int:
    """The number of layers that share one place in the config, because a stack repeats it."""
    names = path.split(".")
    above = [get(cfg, ".".join(names[:count])) if count else cfg for count in range(len(names))]
    return math.prod(node.num_layers for node in above if isinstance(node, Repeat.Config))


def _candidates(
    kind: type[Offer], value: Config | Mapping[str, object] | None, choice: Choice | None
) -> Iterator[Candidate]:
    entries = value.values() if isinstance(value, Mapping) else (value,)
    order = value.order if isinstance(value, ChooseKernel.Config | FirstSupported) else entries
    held = {type(node) for node in order if isinstance(node, Config)}
    named: set[type] = set()
    for plugin, offer in registry().offers(kind):
        try:
            node_type = config_type(plugin, offer)
        except Exception as error:  # broken offers are candidates too
            yield Candidate(offer.name, _name(plugin), f"no: {error}")
            continue
        named.add(node_type)
        yield Candidate(offer.name, _name(plugin), _verdict(node_type, offer, held, choice))
    for node_type in sorted(held - named, key=type_name):
        owner = registry().owner(node_type.__module__)
        label = type_name(node_type).rpartition(".")[2]
        yield Candidate(label, _name(owner), _verdict(node_type, None, held, choice))


def _verdict(node_type: type[Config], offer: Offer | None, held: Iterable[type], choice: Choice | None) -> str:
    name = "" if offer is None else offer.name
    if choice is None:
        if node_type in held or offer is None:
            return "chosen"
        return f"not attached; {offer.usage.format(name=name)}"
    if choice.chosen is not None and isinstance(choice.chosen, node_type.target or node_type):
        return "; ".join(dict.fromkeys(["chosen", *_settings(choice)]))
    refused = {type(each): reason for each, reason in choice.refused}
    if (reason := refused.get(node_type.target or node_type)) is not None:
        return f"no: {reason}"
    is_kernel = issubclass(node_type, AttentionKernel.Config)
    if node_type in held:
        return f"not needed: an earlier {'kernel' if is_kernel else 'grouped product'} in the order is chosen"
    reason = _refusal(node_type, choice.requests)
    if reason is not None:
        return f"no: {reason}"
    return f'possible; use("kernels", order=("{name}",))' if is_kernel else f'possible; use("{name}")'


def _settings(choice: Choice) -> Iterator[str]:
    """The settings of the chosen kernel for each request, and whether they were measured."""
    for request, settings in zip(choice.requests, choice.settings, strict=False):
        tuning = choice.chosen.config.tuning if isinstance(choice.chosen, TunableKernel) else None
        origin = "not measured" if tuning is None else "measured"
        if tuning is not None and tuning.find(request) is None:
            origin = f"defaults: the tuning has no settings for the call {request.signature!r}"
        yield ", ".join(f"{name}={value}" for name, value in settings.items()) + f" ({origin})"


def _refusal(node_type: type[Config], requests: Sequence[Any]) -> str | None:
    """Why an implementation that is not in the config does not support one of the requests; None if it supports all."""
    try:
        if issubclass(node_type, AttentionKernel.Config):
            return refusal(built(node_type(), requests[0]), *requests)
        matmul = node_type()
        assert isinstance(matmul, GroupedMatmul)
        return next((reason for request in requests if (reason := matmul.supports(request)) is not None), None)
    except axcore.ConfigError as error:
        return str(error)


def built(cfg: Config, request: KernelRequest) -> AttentionKernel:
    """A kernel for the widths of a request."""
    widths = {
        "input_dim": request.num_heads * request.head_dim,
        "num_heads": request.num_heads,
        "num_kv_heads": request.num_kv_heads,
        "head_dim": request.head_dim,
    }
    kernel: AttentionKernel = cfg.fill(**{name: value for name, value in widths.items() if has_field(cfg, name)}).build(
        rngs=Rngs(0)
    )
    return kernel


def _name(plugin: Plugin | None) -> str:
    return str(plugin) if plugin is not None else CORE


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    """Rows in columns. The last column is wrapped at `WIDTH`."""
    every = [head, *rows] if head else rows
    widths = [max(map(len, column)) for column in zip(*every, strict=True)]
    indent = sum(widths[:-1]) + 2 * len(widths[:-1])
    lines: list[str] = []
    for row in every:
        start = "".join(cell.ljust(width + 2) for cell, width in zip(row[:-1], widths, strict=False))
        wrapped = textwrap.wrap(row[-1], max(MIN_COLUMN, WIDTH - indent), break_on_hyphens=False) or [""]
        lines += [f"{start}{wrapped[0]}".rstrip(), *(" " * indent + rest for rest in wrapped[1:])]
    return lines
