"""Contract 6: every recipe for a GPU target resolves to a fused kernel for its own input, and nothing falls back
silently."""

import dataclasses

import jax
import pytest

import axcore as ax
from axcore.aot.explain import explain
from axcore.config import has_field
from axcore.module import abstract
from axcore.nn import Attention, ChooseKernel, ReferenceKernel, refusal
from axcore.nn.attention.request import KernelRequest
from axcore.nn.choosing import recording
from axcore.plugin import Accelerator, registry
from axcore.plugin.offers import Recipe
from axcore.train.data.form import batch_form

TARGET = "gpu-h100-8"


@pytest.mark.parametrize("name", ["llama2-7b", "gpt-oss-20b", "deepseek-v3", "gemma3-4b", "smollm2-135m"])
def test_recipes_with_packed_rows_choose_a_fused_kernel(name):
    """Covers sliding windows, sinks, latent attention, and heads of 64 and 256 features."""
    found = explain(ax.pipe(ax.recipe(name), ax.target(TARGET)), TARGET)
    kernels = [slot for slot in found.slots if slot.kind == "attention kernel"]
    assert kernels
    for slot in kernels:
        assert "packed rows" in slot.request
        assert [each.name for each in slot.candidates if each.verdict == "chosen"] == ["cudnn"], slot


def layout_of(cfg, target):
    found = Accelerator.parse(target)
    return cfg.mesh.abstract(found.count, found.platform, found.kind)


def kernels_of(cfg):
    return ax.select(cfg, lambda _, node: has_field(node, "kernel"))


def traced(cfg, target=TARGET):
    """Traces the loss as the step does, on a layout of the target."""
    fn, params, state = abstract(cfg.model)
    objective = cfg.objective.build()
    with layout_of(cfg, target).active():
        jax.eval_shape(lambda *args: fn(*args, method=objective), params, state, batch_form(cfg.input))


def test_an_unsupported_call_raises_unless_another_kernel_is_listed():
    cfg = ax.pipe(ax.recipe("llama-1b"), ax.target(TARGET))
    capped = ax.select(cfg, Attention).set(softcap=50.0)
    refused = "CudnnKernel: does not take softcap"
    told = rf"attention\.kernel: no kernel supports the call \(gpu, .* packed rows, softcap\)\..*{refused}"
    with pytest.raises(ax.ConfigError, match=told):
        traced(capped)
    orders = [node.order for _, node in ax.config.walk(cfg) if isinstance(node, ChooseKernel.Config)]
    assert orders and not any(isinstance(kernel, ReferenceKernel.Config) for order in orders for kernel in order)
    allowed = ax.pipe(capped, ax.use("kernels", order=("cudnn", "reference")))
    traced(allowed)


GPUS = ("gpu-h100-8", "gpu-h200-8", "gpu-b200-8")
TPUS = ("tpu-v4-8", "tpu-v5e-8", "tpu-v5p-8", "tpu-v6e-8", "tpu-7x-8")
SHORT = ("llama2-7b", "quickstart")
RECIPES = [
    name if name in SHORT else pytest.param(name, marks=pytest.mark.long)
    for name in sorted(offer.name for _, offer in registry().offers(Recipe))
]


@pytest.mark.parametrize(("kernel", "targets"), [("CudnnKernel", GPUS), ("SplashKernel", TPUS)])
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_has_a_fused_kernel_on_every_accelerator(name, kernel, targets):
    """The requests of one target are checked for the device kinds of the others. cuDNN does not support float32, in
    which `quickstart` computes, so its rule keeps the default kernel."""
    adapted = {target: ax.pipe(ax.recipe(name), ax.target(target)) for target in targets}
    if kernel == "CudnnKernel" and name == "quickstart":
        kernel = "ReferenceKernel"
    with recording() as recorded:
        traced(adapted[targets[0]], targets[0])
    choices = [choice for choice in recorded if isinstance(choice.requests[0], KernelRequest)]
    assert choices
    for target, cfg in adapted.items():
        assert [node.kernel for _, node in kernels_of(cfg)] == [
            node.kernel for _, node in kernels_of(adapted[targets[0]])
        ]
        device_kind = layout_of(cfg, target).device_kind
        for choice in choices:
            assert type(choice.chosen).__name__ == kernel, choice.problem()
            requests = [dataclasses.replace(each, device_kind=device_kind) for each in choice.requests]
            assert refusal(choice.chosen, *requests) is None


def test_a_recipe_names_splash_on_tpus():
    target = "tpu-v5p-8"
    found = explain(ax.pipe(ax.recipe("llama2-7b"), ax.target(target)), target)
    (slot,) = [slot for slot in found.slots if slot.kind == "attention kernel"]
    assert "packed rows" in slot.request
    assert [each.name for each in slot.candidates if each.verdict.startswith("chosen")] == ["splash"]
