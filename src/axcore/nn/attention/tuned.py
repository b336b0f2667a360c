"""The file that `axcore tune` writes, and the feature that applies it to a config."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Self, cast

from axcore.config import Config, ConfigError, FrozenDict, select, walk
from axcore.nn.attention.choice import ChooseKernel
from axcore.nn.attention.kernel import AttentionKernel, TunableKernel
from axcore.nn.tuning import Settings, Tuning
from axcore.plugin import AttentionKernelOffer, registry


@dataclasses.dataclass(frozen=True)
class TuningFile:
    """What was measured on one kind of device.

    Attributes:
        kernels: name of a kernel -> signature of a request -> its fastest settings.
        order: the names of the kernels, the fastest first.
    """

    device_kind: str
    kernels: Mapping[str, Mapping[str, Settings]]
    order: tuple[str, ...]

    def write(self, path: str | pathlib.Path) -> None:
        pathlib.Path(path).write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: str | pathlib.Path) -> Self:
        """
        Raises:
            ConfigError: there is no such file, or `axcore tune` did not write it.
        """
        try:
            found = json.loads(pathlib.Path(path).read_text())
        except OSError as error:
            raise ConfigError(
                f"cannot read the tuning file {path}: {error.strerror}. Write it with `axcore tune RECIPE --out {path}`"
            ) from error
        except ValueError as error:
            raise ConfigError(f"{path} is not a file that `axcore tune` wrote: {error}") from error
        if problem := _problem(found):
            raise ConfigError(f"{path} is not a file that `axcore tune` wrote: {problem}")
        for kernel in found["kernels"].values():
            Tuning(device_kind=found["device_kind"], settings=kernel)
        return cls(found["device_kind"], found["kernels"], tuple(found["order"]))


def _problem(found: object) -> str:
    """What is wrong with the content of a tuning file, apart from the settings; empty if nothing is."""
    names = [field.name for field in dataclasses.fields(TuningFile)]
    if not isinstance(found, dict) or set(found) != set(names):
        return f"it must be an object with {', '.join(names)}"
    kernels, order = found["kernels"], found["order"]
    if not isinstance(kernels, dict) or not all(isinstance(each, dict) for each in kernels.values()):
        return "kernels must be an object with an object of settings for each kernel"
    if not isinstance(order, list) or not all(isinstance(each, str) for each in order) or len({*order}) < len(order):
        return f"order must be a list of different names, not {json.dumps(order)}"
    return ""


def kernel_name(cfg: AttentionKernel.Config) -> str:
    """The name of the offer of a kernel, or of its class if no plugin offers it."""
    target = f"{cfg.target.__module__}:{cfg.target.__qualname__}"
    for _, offer in registry().offers(AttentionKernelOffer):
        if offer.target in (target, f"axcore.nn:{cfg.target.__qualname__}"):
            return offer.name
    return str(cfg.target.__qualname__)


def use_tuned(cfg: Config, file: str, order: bool = False) -> Config:
    """Sets the block sizes that `axcore tune` measured. They become part of the config, so the run needs no file.

    Args:
        file: the file that `axcore tune --out` wrote.
        order: whether the kernels of each order are also sorted by their measured time.

    Raises:
        ConfigError: the file has nothing about the kernels of the config, or `order` is set and no attention has an
            order with a kernel that was measured.
    """
    found = TuningFile.read(file)
    nodes = [node for _, node in walk(cfg) if isinstance(node, AttentionKernel.Config)]
    kernels = {kernel_name(node): node for node in nodes if not isinstance(node, ChooseKernel.Config)}
    measured = {name for name, settings in found.kernels.items() if settings}
    tunable = {name for name, node in kernels.items() if isinstance(node, TunableKernel.Config)} & measured
    if not tunable and not (order and kernels.keys() & set(found.order)):
        raise ConfigError(_nothing_to_apply(file, found, kernels.keys(), order))
    if tunable:
        cfg = select(cfg, TunableKernel).map(lambda _, node: _tuned(node, found))
    if not order:
        return cfg
    ordered = {kernel_name(each) for node in nodes if isinstance(node, ChooseKernel.Config) for each in node.order}
    if not ordered & set(found.order):
        held = f"an order of {', '.join(sorted(ordered))}" if ordered else "no order of kernels"
        raise ConfigError(
            f"order=True has no effect: {file} has the order {', '.join(found.order) or 'of no kernels'}, but the "
            f"config has {held}. Set order=False, or give the config an order of measured kernels: "
            f'use("kernels", order=("...", "reference"))'
        )
    return select(cfg, ChooseKernel).map(lambda _, node: _sorted(node, found.order))


def _tuned(node: Config, found: TuningFile) -> Config:
    settings = found.kernels.get(kernel_name(cast(AttentionKernel.Config, node)))
    if not settings:
        return node
    return node.set(tuning=Tuning(device_kind=found.device_kind, settings=FrozenDict(settings)))


def _sorted(node: Config, order: Sequence[str]) -> Config:
    """The kernels by their place in `order`; those that it lacks come last."""
    rank = {name: place for place, name in enumerate(order)}
    kernels = cast(ChooseKernel.Config, node).order
    return node.set(order=tuple(sorted(kernels, key=lambda each: rank.get(kernel_name(each), len(rank)))))


def _nothing_to_apply(file: str, found: TuningFile, kernels: Iterable[str], order: bool) -> str:
    """The error message for a file that is about other kernels."""
    tuned = [name for name, settings in found.kernels.items() if settings]
    if not tuned and not order:
        return f"{file} has no block sizes, only an order of kernels. Apply it with order=True"
    measured = ", ".join(dict.fromkeys((*tuned, *found.order))) or "none"
    return (
        f"{file} was measured with the kernels {measured}, but the config has {', '.join(kernels) or 'none'}. Run "
        f"`axcore tune` with the edits of this config"
    )
