"""The conformance suite of the requests that an attention kernel supports."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import (
    Attention,
    AttentionKernel,
    Causal,
    Contiguous,
    KernelRequest,
    ReferenceKernel,
    SameSegment,
    refusal,
    use_kernels,
)
from axcore.nn.choosing import recording
from axcore.testing.models import tiny_model

Changes = Mapping[str, Any]


def training_request(platform: str, device_kind: str, **changes: Any) -> KernelRequest:
    """The request of a training step with packed rows: bfloat16, 2 rows of 64 tokens, 8 query and 2 kv heads of 128."""
    usual = KernelRequest(
        platform=platform,
        device_kind=device_kind,
        dtype=jnp.dtype(jnp.bfloat16),
        batch=2,
        query_len=64,
        key_len=64,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        value_dim=128,
        scale=0.1,
        mask=Causal() & SameSegment(),
        packed=True,
        partial=False,
        aligned=True,
        phase="train",
        options=(),
        view=Contiguous,
        training=True,
    )
    return dataclasses.replace(usual, **changes)


class RequestSuite:
    """Checks which requests a kernel supports, without running it.

    ```python
    class TestRequests(RequestSuite):
        name = "my-kernel"
        kernel = MyKernel.Config(head_dim=128)
        request = training_request("gpu", "NVIDIA H100 80GB HBM3")
        supported = [{}, {"packed": False}]
        refused = [({"platform": "tpu"}, "requires a GPU")]
    ```

    Attributes:
        name: the name of the kernel's offer and feature.
        kernel: its config.
        request: a request that the kernel supports.
        supported: changes of `request` that the kernel also supports.
        refused: changes of `request` that it does not support, with a part of the reason.
        elsewhere: a part of the reason on a CPU.
    """

    name: ClassVar[str]
    kernel: ClassVar[AttentionKernel.Config]
    request: ClassVar[KernelRequest]
    supported: ClassVar[Sequence[Changes]]
    refused: ClassVar[Sequence[tuple[Changes, str]]]
    elsewhere: ClassVar[str] = "got cpu"

    def _refusal(self, changes: Changes) -> str | None:
        return refusal(self.kernel.build(rngs=ax.Rngs(0)), dataclasses.replace(self.request, **changes))

    def test_supported_requests(self) -> None:
        wrong = {str(changes): reason for changes in ({}, *self.supported) if (reason := self._refusal(changes))}
        assert not wrong

    def test_refused_requests_have_a_reason(self) -> None:
        found = [(str(changes), reason, self._refusal(changes)) for changes, reason in self.refused]
        assert not [each for each in found if each[1] not in (each[2] or "")]

    def test_the_kernel_alone_raises_on_a_cpu(self) -> None:
        """A run that asks for the kernel by name does not silently use another one."""
        self._requires_a_cpu()
        cfg = ax.pipe(self._model(), ax.use(self.name))
        kinds = {type(child) for _, node in ax.select(cfg, Attention) for child in vars(node).values()}
        assert type(self.kernel) in kinds
        kind = self.kernel.target.__name__
        with pytest.raises(ax.ConfigError, match=rf"attention\.kernel: .*{kind}: .*{self.elsewhere}"):
            _trace(cfg)

    def test_the_next_kernel_of_an_order_is_used_on_a_cpu(self) -> None:
        self._requires_a_cpu()
        with recording() as found:
            _trace(use_kernels(self._model(), (self.name, "reference")))
        assert isinstance(found[0].chosen, ReferenceKernel)
        ((refused, reason),) = found[0].refused
        assert type(refused) is self.kernel.target
        assert self.elsewhere in reason

    def _model(self) -> ax.Config:
        return tiny_model().set(dtypes=ax.DTypes(compute=self.request.dtype))

    def _requires_a_cpu(self) -> None:
        if jax.default_backend() != "cpu":
            pytest.skip("tests the behaviour on a CPU")


def _trace(cfg: ax.Config) -> None:
    fn, params, state = abstract(cfg)
    ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)
    jax.eval_shape(lambda params, ids: fn(params, state, ids)[0][0], params, ids)
