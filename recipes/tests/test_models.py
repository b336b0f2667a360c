"""Recipes of published models: numbers of parameters and distinctive features."""

import math

import jax
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import layers_of

PUBLISHED = {
    "llama2-7b": 6.738e9,
    "llama2-13b": 13.016e9,
    "llama2-70b": 68.977e9,
    "llama3-8b": 8.030e9,
    "llama3-70b": 70.554e9,
    "qwen3-0.6b": 0.596e9,
    "qwen3-8b": 8.191e9,
    "qwen3-30b-a3b": 30.532e9,
    "mixtral-8x7b": 46.703e9,
    "gemma3-4b": 3.880e9,
    "gpt-oss-20b": 20.915e9,
    "smollm2-135m": 134.515e6,
}
"""Number of parameters in the published weights; for Gemma 3, in its text model."""


def parameters(cfg):
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(abstract(cfg.model)[1]))


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_count_equals_the_published_model(name):
    assert parameters(ax.recipe(name)) == pytest.approx(PUBLISHED[name], rel=1e-3)


def test_deepseek_v3_has_671b_parameters_and_one_future_module():
    cfg = ax.recipe("deepseek-v3")
    without = cfg.set(model=cfg.model.set(future=()))
    assert parameters(without) == pytest.approx(671.03e9, rel=1e-3)
    assert len(cfg.model.future) == 1


def test_gemma3_alternates_five_local_layers_and_a_global_layer():
    sizes = [len(place.config.attention.mask.masks) for place in layers_of(ax.recipe("gemma3-4b").model.decoder)]
    assert sizes == ([3] * 5 + [2]) * 5 + [3] * 4


def test_gpt_oss_has_a_window_in_every_second_layer():
    masks = [place.config.attention.mask for place in layers_of(ax.recipe("gpt-oss-20b").model.decoder)]
    assert [len(mask.masks) for mask in masks] == [3, 2] * 12
