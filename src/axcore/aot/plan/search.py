"""The search for the fastest way to run a step that fits: `plan`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from axcore.aot.chips import GIB
from axcore.aot.plan.model import Candidate, Figures, Model
from axcore.aot.report import Report, compile_program
from axcore.aot.targets import Target
from axcore.config import ConfigError, walk
from axcore.nn import Attention, Stack
from axcore.parallel import ByTag, Remat
from axcore.train import Trainer

SHOWN = 12
_POLICIES: tuple[Remat | None, ...] = (None, ByTag(save=("heads", "lse")), Remat())


@dataclasses.dataclass(frozen=True)
class Choice:
    """One candidate with its figures.

    Attributes:
        figures: by formulas.
        report: the compiled step, if it was compiled.
        why: why another candidate is better; empty for the best.
    """

    candidate: Candidate
    figures: Figures
    report: Report | None
    why: str

    @property
    def total(self) -> float:
        """Bytes on each device: of the compiled step if there is one."""
        return self.figures.total if self.report is None else self.report.memory.total


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`.

    Attributes:
        choices: the best first, then those that fit by time, then those that do not by memory.
        tried: the number of ways, each with the fewest microbatches that fit.
        refused: why candidates were left out, with their number.
    """

    target: str
    limit: int
    choices: Sequence[Choice]
    tried: int
    refused: dict[str, int]

    @property
    def best(self) -> Choice | None:
        """The fastest candidate that fits; None if none does."""
        return self.choices[0] if self.choices and not self.choices[0].why else None

    def __str__(self) -> str:
        rows = [("mesh", "remat", "microbatches", "GiB", "compiled", "headroom", "step", "MFU", "")]
        for each in self.choices[:SHOWN]:
            figures, report = each.figures, each.report
            rows.append(
                (
                    " ".join(f"{axis}={size}" for axis, size in each.candidate.shape.items()),
                    policy(each.candidate.remat),
                    str(each.candidate.microbatches),
                    f"{figures.total / GIB:.1f}",
                    "" if report is None else f"{report.memory.total / GIB:.1f}",
                    f"{(self.limit - each.total) / GIB:.1f}",
                    f"{figures.step:.3f} s",
                    f"{figures.mfu:.0%}",
                    each.why or "best",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        head = f"{self.target}: {self.tried} ways, limit {self.limit / GIB:.1f} GiB per device"
        foot = [f"left out: {count} because {why}" for why, count in self.refused.items()]
        foot.append("Memory (GiB), step and MFU are estimates by formulas; `compiled` is the compiler's memory.")
        if self.best is None:
            return "\n".join([head, *table, *foot, "No candidate fits."])
        return "\n".join([head, *table, *foot, "", *_rule(self.target, self.best.candidate)])


def plan(cfg: Trainer.Config, target: str, compiled: int = 2) -> Plan:
    """Searches the mesh, the remat policy and the number of microbatches with which a step is fastest.

    All candidates are ranked by formulas (see `Model`), and the best are compiled until `compiled` of them fit.

    Args:
        cfg: the config with everything but these. Its other remat policies are compared too.
        target: the accelerator, such as `gpu-h100-8x4`.

    Raises:
        ConfigError: the target is unknown, or no candidate can split the model and the batch.
    """
    found = Target.of(target)
    model, limit, refused = Model(cfg, found), found.chip.limit, dict[str, int]()
    figures: list[tuple[Candidate, Figures]] = []
    for shape, remat in ways(cfg, found):
        try:
            figures.append(_fewest_microbatches(model, shape, remat, limit))
        except ConfigError as error:
            why = "the rows of a batch cannot be split so" if "rows" in str(error) else "a parameter cannot be split so"
            refused[why] = refused.get(why, 0) + 1
    if not figures:
        raise ConfigError(f"no mesh of {target} can split this model and its batch: {', '.join(refused)}")
    fitting = sorted((each for each in figures if each[1].total <= limit), key=lambda each: each[1].step)
    others = sorted((each for each in figures if each[1].total > limit), key=lambda each: each[1].total)
    reports: dict[int, Report] = {}
    for index, (candidate, _) in enumerate(fitting):
        if sum(report.fits for report in reports.values()) >= compiled or len(reports) > 2 * compiled:
            break
        reports[index] = compile_program(candidate.applied(cfg), target)
    best = next((index for index in range(len(fitting)) if index not in reports or reports[index].fits), None)
    choices = [
        Choice(*each, reports.get(index), _why(each[1], fitting[best][1], reports.get(index)) if index != best else "")
        for index, each in enumerate(fitting)
        if best is not None
    ]
    choices.sort(key=lambda each: bool(each.why))
    choices += [Choice(*each, None, f"does not fit: {(each[1].total - limit) / GIB:.1f} GiB more") for each in others]
    return Plan(target, limit, choices, len(figures), refused)


def _fewest_microbatches(
    model: Model, shape: Mapping[str, int], remat: Remat | None, limit: int
) -> tuple[Candidate, Figures]:
    """The candidate with the fewest microbatches that fits, since more of them only cost time; or the smallest.

    Raises:
        ConfigError: the batch or a parameter cannot be split over the mesh.
    """
    candidate = Candidate(shape, remat, 1)
    figures = model.figures(candidate)
    while figures.total > limit:
        more = Candidate(shape, remat, 2 * candidate.microbatches)
        try:
            found = model.figures(more)
        except ConfigError:  # fewer than one row on each device
            break
        candidate, figures = more, found
    return candidate, figures


def ways(cfg: Trainer.Config, target: Target) -> Iterator[tuple[dict[str, int], Remat | None]]:
    """The meshes of data, fsdp and tensor parallelism, with each remat policy."""
    count, per_host = target.accelerator.count, target.accelerator.per_host
    heads = [node.num_kv_heads or node.num_heads for _, node in walk(cfg.model) if isinstance(node, Attention.Config)]
    own = [node.remat for _, node in walk(cfg.model) if isinstance(node, Stack.Config) and hasattr(node, "remat")]
    policies = dict.fromkeys((*own, *_POLICIES) if own else (None,))
    for tensor in (1, 2, 4, 8):
        if tensor > per_host or count % tensor or any(number % tensor for number in heads):
            continue
        whole = count // tensor
        near = max(per_host // tensor, 1)
        for fsdp in dict.fromkeys((1, near, *(whole // part for part in (8, 4, 2, 1) if whole % part == 0))):
            if whole % fsdp:
                continue
            shape = {"data": whole // fsdp, "fsdp": fsdp, "tensor": tensor}
            shape = {axis: size for axis, size in shape.items() if size > 1} or {"data": 1}
            yield from ((shape, remat) for remat in policies)


def policy(remat: Remat | None) -> str:
    """A policy in words."""
    if remat is None:
        return "save all"
    if isinstance(remat, ByTag) and remat == ByTag(save=remat.save):
        return f"save {', '.join(remat.save)}"
    return "save inputs" if type(remat) is Remat else repr(remat)


def _why(figures: Figures, best: Figures, report: Report | None) -> str:
    if report is not None and not report.fits:
        return f"does not fit when compiled: {-report.headroom / GIB:.1f} GiB more"
    slower = figures.step / best.step - 1
    if slower < 0.005:
        return "as fast by these formulas"
    return f"{slower:.0%} slower, bound by {figures.slowest}"


def _rule(target: str, candidate: Candidate) -> list[str]:
    """The mesh rule of a candidate, to paste into a plugin."""
    shape = ", ".join(f'"{axis}": {size}' for axis, size in candidate.shape.items())
    return [
        f'# MeshRule("{target}", "my_plugin.rules:planned", "Found by axcore plan.", "{target}")',
        "def planned(cfg):",
        f"    cfg = cfg.set(mesh=cfg.mesh.set(shape={{{shape}}}, dcn={{}}), microbatches={candidate.microbatches})",
        f"    return cfg.set(model=use_remat(cfg.model, {candidate.remat!r}))",
    ]
