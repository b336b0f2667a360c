"""Padding of the vocabulary (`CausalLM.Config.pad_vocab_to`), which published checkpoints do not have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from axcore.module import abstract
from axcore.train.checkpoint.model_folder import flat

Shape = tuple[int, ...]


def unpadded_shapes(cfg: Any, arrays: Mapping[str, Any]) -> dict[str, Shape]:
    """The shape of each array of a model without the padding, by path.

    Args:
        cfg: config of the model.
        arrays: arrays or their forms, by path.
    """
    shapes = {path: tuple(array.shape) for path, array in arrays.items()}
    if cfg.pad_vocab_to == 1:
        return shapes
    _, params, state = abstract(cfg.set(pad_vocab_to=1))
    return shapes | {
        path: tuple(form.shape) for path, form in {**flat(state), **flat(params)}.items() if path in shapes
    }


def unpadded(cfg: Any, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The arrays of a model without the padding, by path."""
    shapes = unpadded_shapes(cfg, arrays)
    return {path: array[tuple(map(slice, shapes[path]))] for path, array in arrays.items()}


def padded(array: np.ndarray[Any, Any], shape: Shape) -> np.ndarray[Any, Any]:
    """An array with zeros appended up to a shape. The logits of these rows are masked."""
    if array.shape == shape:
        return array
    whole = np.zeros(shape, array.dtype)
    whole[tuple(map(slice, array.shape))] = array
    return whole
