"""Every number in a shipped config has a range, which is checked when the config is made."""

import importlib
import math
import pathlib
import types
import typing
from collections.abc import Mapping

import pytest

from axcore.config import ConfigError, Range, known_types
from axcore.config.types import hints

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = ("src", "plugins/*/src", "plugins_kernels/*/src", "recipes/src")
PROBES = {int: (-(10**30), -1, 0, 1, 10**30), float: (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e-60, 1.0, 1e300)}


def shipped():
    """Every config class of the core, the plugins and the recipes."""
    for source in (folder for pattern in SOURCES for folder in ROOT.glob(pattern)):
        for file in source.rglob("*.py"):
            if "Config" in file.read_text() and "templates" not in file.parts and "peers" not in file.parts:
                importlib.import_module(
                    ".".join(file.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
                )
    return {name: cls for name, cls in known_types().items() if name.startswith(("axcore.", "axcore_"))}


def numbers(hint, wrap=lambda value: value, ranges=()):
    """(type, ranges, a function that wraps a number into a value of the field) of each number in an annotation."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        yield from numbers(args[0], wrap, [each for each in args[1:] if isinstance(each, Range)])
    elif origin in (typing.Union, types.UnionType):
        for arm in args:
            yield from numbers(arm, wrap)
    elif origin is tuple:
        for at, arm in enumerate(arm for arm in args if arm is not ...):
            others = [1] * (0 if ... in args else len(args) - 1)
            yield from numbers(arm, lambda value, at=at, others=others: wrap((*others[:at], value, *others[at:])))
    elif isinstance(origin, type) and issubclass(origin, Mapping):
        yield from numbers(args[1], lambda value: wrap({"key": value}))
    elif hint in (int, float):
        yield hint, ranges, wrap


def in_range(value, limit):
    """Computed from the declaration alone."""
    bounds = {
        "at_least": lambda bound: value >= bound,
        "above": lambda bound: value > bound,
        "at_most": lambda bound: value <= bound,
        "below": lambda bound: value < bound,
    }
    declared = {name: getattr(limit, name) for name in bounds if getattr(limit, name) is not None}
    return abs(value) < 1e18 and all(bounds[name](bound) for name, bound in declared.items())


def test_case_every_number_has_a_range_that_is_checked():
    classes = shipped()
    assert len(classes) > 100
    undeclared, wrong, count = [], [], 0
    for name, cls in classes.items():
        for field in cls.__dataclass_fields__:
            hint = hints(cls)[field]
            if hint is typing.Any and cls.__annotations__.get(field, "Any") not in ("Any", typing.Any):
                undeclared.append(f"{name}.{field}: {cls.__annotations__[field]} cannot be evaluated")
            for kind, ranges, wrap in numbers(hint):
                count += 1
                if len(ranges) != 1:
                    undeclared.append(f"{name}.{field}")
                    continue
                literals = {-1} if "Literal[-1]" in str(hint) else set()
                for value in PROBES[kind]:
                    valid = (in_range(value, ranges[0]) and value != 1e-60) or value in literals
                    if value == 1e-60 and ranges[0].above is None:
                        continue  # rounds to the valid 0
                    try:
                        cls(**{field: wrap(value)})
                    except ConfigError as error:
                        if field not in str(error) or (valid and f".{field} must be" in str(error)):
                            wrong.append(f"{name}.{field}={value}: {error}")
                    else:
                        if not valid:
                            wrong.append(f"{name}.{field}={value} is accepted")
    assert not undeclared, undeclared
    assert not wrong, wrong
    assert count > 150


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("learner.schedule.peak", "-1", "must be at least 0, not -1"),
        ("learner.schedule.peak", "nan", "must be finite and at least 0, not nan"),
        ("learner.schedule.warmup_steps", "-5", "must be at least 0, not -5"),
        ("learner.optimizer.others.b1", "2", "must be at least 0 and below 1, not 2"),
        ("learner.optimizer.others.b1", "1", "must be at least 0 and below 1, not 1"),
        ("learner.optimizer.others.b2", "0.999999999", "must be at least 0 and below 1 after rounding to float32"),
        ("learner.optimizer.eps", "0", "must be above 0, not 0"),
        ("objective.z_loss", "-1", "must be at least 0, not -1"),
        ("callbacks.saving.every_minutes", "nan", "must be finite and above 0 or None, not nan"),
    ],
)
def test_case_a_number_out_of_range_is_refused_with_its_path(path, value, message):
    import axcore as ax

    with pytest.raises(ConfigError) as error:
        ax.override(ax.recipe("quickstart"), [f"{path}={value}"])
    assert str(error.value).startswith(f"{path} {message}")


@pytest.mark.parametrize("value", ["2", "1", "-0.1", "nan"])
def test_case_b1_of_a_run_with_adamw_is_refused_with_its_path(value):
    import axcore as ax

    cfg = ax.pipe(ax.recipe("quickstart"), ax.use("adamw"))
    assert ax.override(cfg, ["learner.optimizer.b1=0.5"]).learner.optimizer.b1 == 0.5
    with pytest.raises(
        ConfigError, match=r"^learner\.optimizer\.b1 must be (finite and )?at least 0 and below 1, not "
    ):
        ax.override(cfg, [f"learner.optimizer.b1={value}"])
