"""The features `int8` and `int4`: numerics for the linear maps that they usually apply to."""

from __future__ import annotations

from typing import Literal

import axcore as ax
from axcore.config import walk
from axcore.nn import GroupedLinear, Linear, Stack, put_numerics
from axcore_int8.int4 import Int4
from axcore_int8.int8 import Int8
from axcore_int8.product import WeightGradient


def use_int8(
    cfg: ax.Config,
    activation_scales: Literal["dynamic", "static"] | None = "dynamic",
    percentile: float = 100.0,
    weight_gradient: WeightGradient = "float",
    rounding: Literal["nearest", "stochastic"] = "nearest",
    where: ax.Where | None = None,
) -> ax.Config:
    """INT8 products in every selected linear map.

    Args:
        activation_scales: "dynamic" (one per row), "static" (measured by `axcore.numerics.calibrated`), or None for
            products of float activations and INT8 weights.
        percentile: the percentile of absolute values that static scales map to 127.
        weight_gradient: computes the gradient of the weight in floats or in INT8.
        rounding: of the operands of the backward pass.
        where: selects linear maps. None: with dynamic scales, which serve training, those of all layers but the first
            and the last (see `axcore.nn.put_numerics`); otherwise those of all layers.
    """
    made = Int8.Config(
        activation_scales=activation_scales, percentile=percentile, weight_gradient=weight_gradient, rounding=rounding
    )
    return put_numerics(
        cfg, made, where if activation_scales == "dynamic" or where is not None else _of_all_layers(cfg)
    )


def use_int4(cfg: ax.Config, group_size: Literal[32, 64, 128] = 32, where: ax.Where | None = None) -> ax.Config:
    """Weights of 4 bits in every selected linear map, and float products.

    Args:
        group_size: number of consecutive inputs that share a scale and an offset.
        where: selects linear maps. None: those of all layers, except those that require float32, such as routers.
    """
    return put_numerics(cfg, Int4.Config(group_size=group_size), where if where is not None else _of_all_layers(cfg))


def _of_all_layers(cfg: ax.Config) -> ax.Where:
    """Selects the linear maps inside stacks of layers, except those that require float32."""
    stacks = [path for path, node in walk(cfg) if isinstance(node, Stack.Config)]
    if not stacks:
        raise ax.ConfigError("the config has no stack of layers, such as a Repeat; select the linear maps with where=")

    def selects(path: str, node: ax.Config) -> bool:
        if not isinstance(node, Linear.Config | GroupedLinear.Config):
            return False
        wide = node.dtypes is not None and node.dtypes.compute == "float32"
        return not wide and any(path.startswith(f"{stack}.".lstrip(".")) for stack in stacks)

    return selects
