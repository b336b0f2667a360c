"""Contract 6: every recipe for a GPU target resolves to a fused kernel for its own input, and nothing falls back
silently."""

import jax
import pytest

import axcore as ax
from axcore.aot.explain import explain
from axcore.module import abstract
from axcore.nn import Attention, ChooseKernel
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


def traced(cfg):
    """Traces the loss as the step does, on a layout of the target."""
    fn, params, state = abstract(cfg.model)
    objective = cfg.objective.build()
    with cfg.mesh.abstract(8, "gpu", "h100").active():
        jax.eval_shape(lambda *args: fn(*args, method=objective), params, state, batch_form(cfg.input))


def test_an_unsupported_call_raises_unless_another_kernel_is_listed():
    cfg = ax.pipe(ax.recipe("llama-1b"), ax.target(TARGET))
    capped = ax.select(cfg, Attention).set(softcap=50.0)
    refused = "CudnnKernel: does not take softcap"
    told = rf"attention\.kernel: no kernel supports the call \(gpu, .* packed rows, softcap, .*{refused}"
    with pytest.raises(ax.ConfigError, match=told):
        traced(capped)
    assert not any(isinstance(node, ChooseKernel.Config) and len(node.order) > 1 for _, node in ax.config.walk(cfg))
    allowed = ax.pipe(capped, ax.use("kernels", order=("cudnn", "reference")))
    traced(allowed)
