"""The memory of a step with unrolled layers, from compiled steps of the same model with few layers.

A program with unrolled layers compiles for minutes if the model is deep, but each further layer adds about the same
number of bytes. The formulas know most of them, so their error is extrapolated and not the memory itself: the largest
sum of arrays in a shallow model may be in its output layer, and that of a deep one in its layers.
"""

from __future__ import annotations

from collections.abc import Mapping

from axcore.aot.plan.model import Candidate, Model
from axcore.aot.report import compile_program
from axcore.aot.targets import Target
from axcore.config import Config, ConfigError, select, walk
from axcore.nn import Stack
from axcore.train import Trainer

FEW, MORE = 4, 8
"""The repetitions of a stack in the models that are compiled."""


def memory_from_few_layers(cfg: Trainer.Config, target: Target, candidate: Candidate, formula: float) -> float:
    """Bytes on each device. Compiles one step more than the model has deep stacks.

    Args:
        cfg: a config with at least one stack in `deep`.
        formula: bytes by the formulas.
    """
    stacks = deep(cfg.model)
    few = dict.fromkeys(stacks, FEW)

    def error(counts: Mapping[str, int]) -> float:
        shallow = cfg.set(model=with_repetitions(cfg.model, counts))
        compiled = compile_program(candidate.applied(shallow), target.accelerator.text)
        return compiled.memory.total - Model(shallow, target).figures(candidate).total

    least = error(few)
    total = formula + least
    for path, count in stacks.items():
        total += (count - FEW) * (error(few | {path: MORE}) - least) / (MORE - FEW)
    return total


def deep(model: Config) -> dict[str, int]:
    """Path -> repetitions of the outermost stacks that have more than `MORE` and can have fewer."""
    found: dict[str, int] = {}
    for path, node in walk(model):
        if isinstance(node, Stack.Config) and not any(path.startswith(f"{above}.") for above in found):
            _, count = _repetitions(node)
            if count > MORE and _can_shorten(node):
                found[path] = count
    return found


def with_repetitions[C: Config](model: C, counts: Mapping[str, int]) -> C:
    """The model with fewer layers: path of a stack in `deep` -> its repetitions."""

    def edit(path: str, node: Config) -> Config:
        return _shortened(node, counts[path])

    return select(model, lambda path, _: path in counts).map(edit)


def _shortened(stack: Config, count: int) -> Config:
    assert isinstance(stack, Stack.Config)
    size, _ = _repetitions(stack)
    return stack.restack(tuple(place.config for place in stack.places()[: size * count]))


def _can_shorten(stack: Stack.Config) -> bool:
    try:
        _shortened(stack, FEW)
    except ConfigError:
        return False
    return True


def _repetitions(stack: Stack.Config) -> tuple[int, int]:
    """(layers of the smallest group that the stack repeats, how often it repeats it)."""
    layers = [place.config for place in stack.places()]
    total = len(layers)
    size = next(size for size in range(1, total + 1) if total % size == 0 and layers[size:] == layers[:-size])
    return size, total // size
