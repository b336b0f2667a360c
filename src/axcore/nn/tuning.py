"""Measured settings, such as the block sizes of a kernel. `axcore tune` measures them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Protocol

from axcore.config import Config, ConfigError, FrozenDict, NonNegativeInt

Settings = Mapping[str, int]
"""Config field -> value."""


class MeasuredCall(Protocol):
    """A call whose settings can be measured, such as a `KernelRequest`."""

    @property
    def device_kind(self) -> str:
        """The kind of device as JAX names it."""
        ...

    @property
    def signature(self) -> str:
        """What the best settings depend on, apart from the device."""
        ...


class Tuning(Config):
    """Settings that were measured on one kind of device."""

    device_kind: str
    settings: Mapping[str, Mapping[str, NonNegativeInt]] = FrozenDict()
    """Signature of a call -> config field -> value."""

    def find(self, call: MeasuredCall) -> Settings | None:
        """The settings of a call; None if it was not measured.

        Raises:
            ConfigError: the settings were measured on another kind of device.
        """
        if call.device_kind != self.device_kind:
            raise ConfigError(
                f"tuning was measured on {self.device_kind!r}, but the call runs on {call.device_kind!r}. Measure it "
                f"there with `axcore tune RECIPE --out FILE`, or set tuning=None for the default settings"
            )
        return self.settings.get(call.signature)


def tuned_settings(
    cfg: Config, tuning: Tuning | None, call: MeasuredCall, candidates: Iterable[Settings]
) -> dict[str, int]:
    """The settings that a call runs with: the fields of `cfg` that are set, then those of `tuning`, then those of the
    first candidate.

    Args:
        cfg: a config with a field for each setting, whose default is None.
        tuning: the measured settings; None: not measured.
        candidates: the settings that are worth measuring for the call. The first are its defaults.

    Raises:
        ConfigError: `tuning` was measured on another kind of device, or has other fields or values that the fields do
            not accept.
    """
    found = dict(next(iter(candidates)))
    measured = {} if tuning is None else dict(tuning.find(call) or {})
    if unknown := sorted(measured.keys() - found.keys()):
        raise ConfigError(
            f"tuning sets {', '.join(unknown)}, but the settings are {', '.join(found)}. Measure again with "
            f"`axcore tune RECIPE --out FILE`"
        )
    try:
        cfg.set(**measured)
    except ConfigError as error:
        raise ConfigError(f"tuning: {error}. Measure again with `axcore tune RECIPE --out FILE`") from error
    given = {name: getattr(cfg, name) for name in found}
    return found | measured | {name: value for name, value in given.items() if value is not None}
