"""Contract 5: the layout determines the platform, and lowering uses the kernel selected for it."""

import jax
import pytest

import axcore as ax
from axcore.nn import Attention, AttentionKernel, ChooseKernel, ReferenceKernel
from axcore.parallel import Mesh
from axcore.testing import tiny_batch, tiny_model
from axcore.train import CrossEntropy, Learner
from axcore.train.step.program import program

RULES = {"batch": "data", "head": "tensor", "kv_head": "tensor"}
MESH = Mesh(shape={"data": 4, "tensor": 2}, rules=RULES)


@jax.custom_vjp
def _on_tpu(q):
    return jax.ffi.ffi_call("probe_of_a_tpu_kernel", jax.ShapeDtypeStruct(q.shape, q.dtype))(q)


_on_tpu.defvjp(lambda q: (_on_tpu(q), None), lambda _, g: (g,))


class TpuKernel(AttentionKernel):
    """Supports only TPUs, so this host cannot run it."""

    def supports(self, request):
        if request.platform != "tpu":
            return f"requires a TPU, got {request.platform}"
        assert (request.batch, request.num_heads, request.num_kv_heads) == (2, 2, 1), "the request is for one shard"
        return None

    def __call__(self, inputs):
        assert inputs.q.shape[:3] == (2, 8, 2), "under shard_map a kernel sees one device's rows and heads"
        return _on_tpu(inputs.q), None


def lowered(layout, **kernel):
    cfg = ax.select(tiny_model(), Attention).set(**kernel)
    made = program(cfg, Learner.Config(), layout, CrossEntropy.Config())
    return made.lower_train(
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tiny_batch(rows=8))
    ).as_text()


def test_a_tpu_only_kernel_is_in_the_step_lowered_for_a_tpu():
    order = ChooseKernel.Config(order=(TpuKernel.Config(), ReferenceKernel.Config()))
    text = lowered(MESH.abstract(8, "tpu", "TPU v5 lite"), kernel=order)
    assert "probe_of_a_tpu_kernel" in text
    assert "probe_of_a_tpu_kernel" not in lowered(MESH.abstract(8, "cpu"), kernel=order)


def test_kernels_that_the_target_does_not_support_are_rejected():
    class CpuKernel(ReferenceKernel):
        def supports(self, request):
            return None if request.platform == "cpu" else f"requires a CPU, got {request.platform}"

    request = r"\(tpu, .* batch=2, .* num_heads=2, num_kv_heads=1, head_dim=4.*\)"
    told = rf"attention\.kernel: no kernel supports the call {request}\. CpuKernel: requires a CPU"
    with pytest.raises(ax.ConfigError, match=told):
        lowered(MESH.abstract(8, "tpu"), kernel=CpuKernel.Config())
