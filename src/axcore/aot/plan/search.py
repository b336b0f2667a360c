"""The search for the fastest way to run a step that fits: `plan`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from axcore.aot.plan.depth import FEW, MORE, deep, memory_from_few_layers
from axcore.aot.plan.model import BatchNotDivisible, Candidate, Figures, Model
from axcore.aot.report import compile_program
from axcore.aot.targets import Target
from axcore.config import AxcoreError, ConfigError, has_field, walk
from axcore.config.memory import size
from axcore.nn import Attention, Stack
from axcore.parallel import ByTag, Remat
from axcore.plugin import recipe_of
from axcore.train import Trainer

SHOWN = 12
_TRIED = 4
"""Candidates whose memory is compiled for each one that must fit."""
_DOUBT = 0.1
"""If a figure from few layers is nearer than this to the limit, the whole step is compiled."""
_SIZES = (1, 2, 4, 8)
"""Sizes of the axes that divide the work on one token or one row."""
_HEADS = ByTag(save=("heads", "lse"))
_LAYERS: tuple[tuple[Remat | None, bool], ...] = ((None, True), (None, False), (_HEADS, False), (Remat(), False))
"""Remat policies, and whether layers are unrolled. Unrolled layers with remat need more memory than scanned ones."""


@dataclasses.dataclass(frozen=True)
class Choice:
    """One candidate with its figures.

    Attributes:
        figures: by formulas.
        memory: bytes on each device.
        source: what `memory` is from: `formula`; `scaled`, which is the formula with the error found for another
            candidate of the same kind; a number of layers that were compiled; or `compiled`.
        why: why another candidate is better; empty for the best.
    """

    candidate: Candidate
    figures: Figures
    memory: float
    source: str
    why: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        recipe: the name of the recipe; empty if no recipe made the config.
        choices: the best first, then those that fit by time, then those that do not by memory.
        tried: the number of ways, each with the fewest microbatches that fit.
        refused: why candidates were left out, with their number.
    """

    target: str
    recipe: str
    limit: int
    choices: Sequence[Choice]
    tried: int
    refused: dict[str, int]

    @property
    def best(self) -> Choice | None:
        """The fastest candidate that fits; None if none does."""
        return self.choices[0] if self.choices and not self.choices[0].why else None

    def __str__(self) -> str:
        rows = [("mesh", "layers", "microbatches", "memory", "from", "headroom", "step", "MFU", "")]
        for each in self.choices[:SHOWN]:
            figures, candidate = each.figures, each.candidate
            rows.append(
                (
                    " ".join(f"{axis}={size}" for axis, size in candidate.shape.items()),
                    layers(candidate),
                    str(candidate.microbatches),
                    size(each.memory),
                    each.source,
                    "-" * (each.memory > self.limit) + size(abs(self.limit - each.memory)),
                    f"{figures.step:.3f} s",
                    f"{figures.mfu:.0%}",
                    each.why or "best",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = f"{self.target}: {self.tried} ways, limit {size(self.limit)} per device"
        foot = [f"left out: {count} because {why}" for why, count in self.refused.items()]
        if self.tried > SHOWN:
            foot.append(f"{self.tried - SHOWN} slower or larger ways are not shown.")
        foot.append("Step and MFU are estimates by formulas. `from` says where the memory per device is from.")
        if self.best is None:
            return "\n".join([head, *table, *foot, "No candidate fits."])
        return "\n".join([head, *table, *foot, "", *_rule(self.target, self.recipe, self.best.candidate)])


def plan(cfg: Trainer.Config, target: str, compiled: int = 2) -> Plan:
    """Searches for the way to run a step that is fastest and fits.

    Candidates are ranked by formulas (see `Model`). The best are compiled, with all layers or with few, until
    `compiled` of them fit. Each compiled one corrects the memory of the others of its kind.
    Optimizer offload and context parallelism are tried if nothing else fits. Offload of activations is not tried:
    recomputing them saves as much memory at a tenth of the time (measured on one H200).

    Args:
        cfg: the config with everything but these. Its own way to run the layers is compared too.
        target: the accelerator, such as `gpu-h100-8x4`.

    Raises:
        ConfigError: the target is unknown, or no candidate can split the model and the batch.
    """
    found = Target.of(target)
    search = Search(cfg, found)
    search.run(ways(cfg, found, search.model.experts), compiled)
    if search.best() is None:
        search.run(more_ways(cfg, found), compiled)
    return search.plan()


class Error(NamedTuple):
    """The error of the formulas for the largest compiled step of a kind. In smaller steps it depends more on how the
    compiler packs its buffers.

    Attributes:
        temporaries: bytes by the formulas.
        factor: bytes in the compiled step, as a multiple of `temporaries`.
    """

    temporaries: float
    factor: float


class Search:
    """Candidates, and what compiling some of them found."""

    def __init__(self, cfg: Trainer.Config, target: Target):
        self.cfg, self.target, self.model = cfg, target, Model(cfg, target)
        self.limit = target.chip.limit
        self.ways: list[Candidate] = []
        self.refused: dict[str, int] = {}
        self.measured: dict[Candidate, tuple[float, str]] = {}
        self.errors: dict[object, Error] = {}
        """`_kind` of candidates -> the error of the formulas."""

    def run(self, ways: Iterable[Candidate], compiled: int) -> None:
        """Adds candidates and compiles the best, until `compiled` of them fit."""
        for candidate in ways:
            try:
                self.model.figures(candidate)
            except ConfigError as error:
                part = "the rows of a batch" if isinstance(error, BatchNotDivisible) else "a parameter"
                self._refuse(f"{part} cannot be split so")
            else:
                self.ways.append(candidate)
        for _ in range(_TRIED * compiled):
            fitting = [each for each in self.ranked() if each.memory <= self.limit]
            best = [each for each in fitting if each.candidate not in self.measured][:1]
            if not best or sum(each.candidate in self.measured for each in fitting) >= compiled:
                break
            self.measure(best[0])

    def _refuse(self, why: str) -> None:
        self.refused[why] = self.refused.get(why, 0) + 1

    def ranked(self) -> list[Choice]:
        """Each way with the fewest microbatches that fit, since more of them only cost time: those that fit by time,
        then those that do not by memory."""
        found = [self.fewest_microbatches(each) for each in self.ways]
        return sorted(
            found, key=lambda each: (over := each.memory > self.limit, each.memory if over else each.figures.step)
        )

    def best(self) -> Choice | None:
        """The fastest that fits: of those that were compiled, if there are any."""
        fitting = [each for each in self.ranked() if each.memory <= self.limit]
        return next((each for each in fitting if each.candidate in self.measured), fitting[0] if fitting else None)

    def fewest_microbatches(self, candidate: Candidate) -> Choice:
        choice = self.choice(candidate)
        while choice.memory > self.limit:
            try:
                choice = self.choice(
                    dataclasses.replace(choice.candidate, microbatches=2 * choice.candidate.microbatches)
                )
            except BatchNotDivisible:  # fewer than one row on each device
                break
        return choice

    def choice(self, candidate: Candidate) -> Choice:
        figures = self.model.figures(candidate)
        if candidate in self.measured:
            return Choice(candidate, figures, *self.measured[candidate])
        error = self.errors.get(_kind(candidate))
        if error is None:
            return Choice(candidate, figures, figures.total, "formula")
        return Choice(candidate, figures, figures.state + figures.temporaries * error.factor, "scaled")

    def measure(self, choice: Choice, *, whole: bool = False) -> None:
        """Finds the memory of a candidate with the compiler, and the error of the formula.

        Args:
            whole: compiles all layers even if few of them are enough.
        """
        candidate, figures = choice.candidate, choice.figures
        try:
            memory, source = self.compiled(candidate, figures, whole)
        except AxcoreError as error:
            self._refuse(str(error))
            count = candidate.microbatches
            self.ways = [each for each in self.ways if dataclasses.replace(each, microbatches=count) != candidate]
            return
        self.measured[candidate] = memory, source
        found = Error(figures.temporaries, (memory - figures.state) / figures.temporaries)
        kind = _kind(candidate)
        self.errors[kind] = max(found, self.errors.get(kind, found))

    def compiled(self, candidate: Candidate, figures: Figures, whole: bool) -> tuple[float, str]:
        """(bytes on each device, what they are from)."""
        if not whole and candidate.unroll and deep(self.cfg.model):
            memory = memory_from_few_layers(self.cfg, self.target, candidate, figures.total)
            if abs(memory / self.limit - 1) > _DOUBT:
                return memory, f"{FEW} and {MORE} layers"
        return compile_program(candidate.applied(self.cfg), self.target.accelerator.text).memory.total, "compiled"

    def plan(self) -> Plan:
        """
        Raises:
            ConfigError: no candidate can split the model and the batch.
        """
        if not self.ways:
            accelerator, rows = self.target.accelerator, self.cfg.input.batch_size
            raise ConfigError(
                f"no mesh of {accelerator.text} can split this model and its batch of {rows} rows: "
                f"{', '.join(self.refused)}. A batch of a multiple of {accelerator.count} rows (--global-batch) can be "
                f"split in most ways"
            )
        best = self.best()
        choices = [dataclasses.replace(each, why=self.why(each, best)) for each in self.ranked()]
        choices.sort(key=lambda each: bool(each.why))
        recipe = recipe_of(self.cfg)
        return Plan(self.target.accelerator.text, recipe, self.limit, choices, len(self.ways), self.refused)

    def why(self, choice: Choice, best: Choice | None) -> str:
        if choice.memory > self.limit or best is None:
            return f"does not fit: {size(choice.memory - self.limit)} more"
        if choice == best:
            return ""
        slower = choice.figures.step / best.figures.step - 1
        if slower < -0.005:
            return f"{-slower:.0%} faster, but not compiled"
        return (
            "as fast by these formulas" if slower < 0.005 else f"{slower:.0%} slower, bound by {choice.figures.slowest}"
        )


def _kind(candidate: Candidate) -> tuple[object, ...]:
    """Equal for candidates for which the formula has about the same error.

    Their programs have the same collectives: each axis but fsdp adds some, such as the sums of gradients over `data`.
    """
    axes = ("data", "expert", "context", "tensor")
    return (*candidate.program, *(axis for axis in axes if candidate.shape.get(axis, 1) > 1))


def ways(cfg: Trainer.Config, target: Target, experts: int = 0) -> Iterator[Candidate]:
    """Meshes of data, fsdp, expert and tensor parallelism, with each way to run the layers.

    Args:
        experts: the number of experts of each mixture; 0 without mixtures.
    """
    for shape in shapes(cfg, target, [each for each in _SIZES if each == 1 or (experts and experts % each == 0)]):
        for remat, unroll in _ways_of_layers(cfg, target):
            yield Candidate(shape, remat, 1, unroll)


def more_ways(cfg: Trainer.Config, target: Target) -> Iterator[Candidate]:
    """What takes less memory and more time: optimizer state in host memory, and rows that several devices share."""
    for shape in shapes(cfg, target):
        if target.chip.platform != "cpu":
            yield from (Candidate(shape, remat, 1, offload=True) for remat in (_HEADS, Remat()))
        for context in _SIZES[1:]:
            fsdp = shape.get("fsdp", 1)
            if fsdp % context == 0:
                rest = {axis: size for axis, size in shape.items() if axis != "fsdp"}
                divided = {"fsdp": fsdp // context, "context": context, **rest}
                yield from (Candidate(divided, remat, 1) for remat in (_HEADS, Remat()))


def shapes(cfg: Trainer.Config, target: Target, experts: Sequence[int] = (1,)) -> Iterator[dict[str, int]]:
    """Meshes of data, fsdp, expert and tensor parallelism, with these sizes of the axis `expert`."""
    count, per_host = target.accelerator.count, target.accelerator.per_host
    heads = [node.num_kv_heads or node.num_heads for _, node in walk(cfg.model) if isinstance(node, Attention.Config)]
    for tensor, expert in itertools.product(_SIZES, experts):
        inner = tensor * expert
        if inner > per_host or count % inner or any(number % tensor for number in heads):
            continue
        whole = count // inner
        near = max(per_host // inner, 1)
        for fsdp in dict.fromkeys((1, near, *(whole // part for part in (8, 4, 2, 1) if whole % part == 0))):
            if whole % fsdp:
                continue
            shape = {"data": whole // fsdp, "fsdp": fsdp, "expert": expert, "tensor": tensor}
            yield {axis: size for axis, size in shape.items() if size > 1} or {"data": 1}


def _ways_of_layers(cfg: Trainer.Config, target: Target) -> Iterator[tuple[Remat | None, bool]]:
    """The remat policies, each with whether layers are unrolled: first those of the config."""
    stacks = [node for _, node in walk(cfg.model) if isinstance(node, Stack.Config) and has_field(node, "remat")]
    own = [(getattr(node, "remat"), getattr(node, "unroll", 1) > 1) for node in stacks]  # noqa: B009
    for remat, unroll in dict.fromkeys((*own, *_LAYERS) if own else ((None, False),)):
        if not unroll or target.chip.platform != "tpu" or (remat, unroll) in own:  # slow to compile, and not faster
            yield remat, unroll


def layers(candidate: Candidate) -> str:
    """How the layers run and where the optimizer state is, in words."""
    parts = (policy(candidate.remat), "unrolled" * candidate.unroll, "optimizer on host" * candidate.offload)
    return ", ".join(filter(None, parts))


def policy(remat: Remat | None) -> str:
    """A policy in words."""
    if remat is None:
        return "save all"
    if isinstance(remat, ByTag) and remat == ByTag(save=remat.save):
        return f"save {', '.join(remat.save)}"
    return "save inputs" if type(remat) is Remat else repr(remat)


def _rule(target: str, recipe: str, candidate: Candidate) -> list[str]:
    """The mesh rule of a candidate, to paste into a plugin: the offer, then a module with the function.

    The offer names the recipe, because memory and time are those of one model.
    """
    shape = ", ".join(f'"{axis}": {size}' for axis, size in candidate.shape.items())
    memory = '"host"' if candidate.offload else '"device"'
    only = f', recipe="{recipe}"' if recipe else ""
    policies = sorted({type(node).__name__ for _, node in walk(candidate.remat)}) if candidate.remat else []
    return [
        "To keep this layout, paste both parts into a plugin (axcore new-plugin NAME --kind parallelism).",
        "",
        "# plugin.py, in the list that axcore_mesh_rules returns; my_plugin is the package of the plugin",
        f'MeshRule("planned", "my_plugin.rules:planned", "Found by axcore plan.", "{target}"{only})',
        "",
        "# rules.py",
        "from axcore.nn import use_remat, use_unroll",
        *([f"from axcore.parallel import {', '.join(policies)}"] if policies else []),
        "",
        "",
        "def planned(cfg):",
        f"    mesh = cfg.mesh.set(shape={{{shape}}}, dcn={{}}, optimizer_memory={memory})",
        f"    model = use_unroll(use_remat(cfg.model, {candidate.remat!r}), {candidate.unroll})",
        f"    return cfg.set(mesh=mesh, model=model, microbatches={candidate.microbatches})",
    ]
