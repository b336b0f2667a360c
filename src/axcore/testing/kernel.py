"""The conformance suite of an attention kernel."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore import nn
from axcore.config import Config
from axcore.module import Rngs
from axcore.nn import Contiguous, KernelRequest, attend_in_parts, refusal
from axcore.parallel import Mesh
from axcore.plugin import AttentionKernelOffer, use
from axcore.testing.attention_cases import CASES, Arrays, Case, arrays_of, formula, inputs_of
from axcore.testing.devices import steps
from axcore.testing.models import loss_and_grads, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

CAPABILITIES = frozenset(need for case in CASES.values() for need in case.needs) | {"gradients", "lse"}
ROUNDING = {dtype: float(jnp.finfo(dtype).eps) / 2 for dtype in ("float32", "bfloat16", "float16")}
"""Largest relative error of rounding to a dtype."""
TOLERANCE = {dtype: 5 * rounding + 3e-5 for dtype, rounding in ROUNDING.items()}
"""Largest absolute error of the outputs, which are of order 1, against float64 with the same rounded inputs: a few
roundings, and the sums and exponentials in float32."""
GRADIENT_TOLERANCE = {dtype: 4 * rounding + 1e-4 for dtype, rounding in ROUNDING.items()}
"""Largest error of each gradient in the L2 norm, relative to `Expected.roundings`. Kernels that compute in float32 and
round their results have 0.6 roundings; those that also round the factors of their products have about 1."""


class KernelSuite(OfferSuite):
    """Checks of an attention kernel against the formula in NumPy float64, forward and backward.

    ```python
    class TestMyKernel(KernelSuite):
        name = "my-kernel"
        lacks = {"sinks", "softcap"}
    ```

    The kernel must give correct results in all cases that require no capability in `lacks`. It must reject the others,
    by omitting the option from `takes` or by returning a reason from `supports`, so that another kernel can be chosen.

    Attributes:
        lacks: the members of `CAPABILITIES` that the kernel does not have.
        dtypes: the dtypes of q, k and v that the kernel supports.
        platform: the platform that the kernel runs on. On other platforms the suite only checks `supports`.
    """

    kind = AttentionKernelOffer
    lacks: ClassVar[frozenset[str] | set[str]] = frozenset()
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    platform: ClassVar[str] = "cpu"

    def model(self) -> Config:
        """A model whose attention calls the kernel supports."""
        return tiny_model()

    def config(self) -> Config:
        return ax.pipe(self.model(), use(self.name, **self.options))

    def test_lacks_contains_only_known_capabilities(self) -> None:
        assert set(self.lacks) <= CAPABILITIES, f"unknown: {set(self.lacks) - CAPABILITIES}; known: {CAPABILITIES}"

    @pytest.mark.parametrize("name", CASES)
    def test_lacks_lists_exactly_the_unsupported_calls(self, name: str) -> None:
        case, kernel = CASES[name], self._kernel(CASES[name])
        lacking = set(case.needs) & set(self.lacks)
        for dtype in self.dtypes:
            reason = refusal(kernel, self._request(case, dtype))
            if lacking:
                assert isinstance(reason, str), f"lacks contains {lacking}, so supports() must return a reason"
                assert len(reason.split()) > 2, f"a reason must have at least three words, got {reason!r}"
            else:
                assert reason is None, (
                    f"the kernel must support this call or list a capability in lacks; it returns: {reason}"
                )

    @pytest.mark.parametrize("name", CASES)
    def test_outputs_equal_the_formula(self, name: str) -> None:
        case = self._runnable(CASES[name])
        for dtype in self.dtypes:
            arrays, call = self._call(case, dtype)
            found = jax.jit(call)(arrays)
            expected = formula(case, arrays).heads
            assert (found.dtype, found.shape) == (jnp.dtype(dtype), expected.shape)
            np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[dtype])

    @pytest.mark.parametrize("name", CASES)
    def test_gradients_equal_the_formula(self, name: str) -> None:
        if "gradients" in self.lacks:
            pytest.skip("lacks contains gradients")
        case = self._runnable(CASES[name])
        for dtype in self.dtypes:
            arrays, call = self._call(case, dtype)
            self._check_gradients(case, dtype, arrays, call)

    @pytest.mark.parametrize("name", ["causal", "two heads per kv head", "documents", "window", "sinks"])
    def test_lse_equals_the_formula(self, name: str) -> None:
        case = self._runnable(self._with_lse(CASES[name]))
        for dtype in self.dtypes:
            arrays, kernel = arrays_of(case, dtype), self._kernel(case)
            inputs = inputs_of(case, arrays, return_lse=True)
            heads, lse = jax.jit(kernel.__call__)(inputs)
            expected = formula(case, arrays)
            assert lse.dtype == jnp.float32, "lse must be float32: merging in bfloat16 loses precision"
            np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=5 * TOLERANCE[dtype])
            np.testing.assert_allclose(np.asarray(heads, np.float64), expected.heads, rtol=0, atol=TOLERANCE[dtype])

    @pytest.mark.parametrize("name", ["causal", "two heads per kv head", "sinks"])
    def test_merging_two_parts_of_the_keys_equals_one_call(self, name: str) -> None:
        case = self._runnable(self._with_lse(CASES[name], "decoding"))
        for dtype in self.dtypes:
            arrays, kernel = arrays_of(case, dtype), self._kernel(case)

            def call(arrays: Arrays, kernel: nn.AttentionKernel = kernel, case: Case = case) -> jax.Array:
                inputs = inputs_of(case, arrays)
                kv, half = inputs.plain, case.key_len // 2
                parts = [Contiguous(kv.k[:, at], kv.v[:, at], jax.tree.map(lambda x, at=at: x[:, at], kv.tokens))
                         for at in (slice(half), slice(half, None))]  # fmt: skip
                with ax.module.root(kernel, key=None, training=True):
                    return attend_in_parts(kernel, inputs, parts)[0]

            expected = formula(case, arrays).heads
            np.testing.assert_allclose(
                np.asarray(jax.jit(call)(arrays), np.float64), expected, rtol=0, atol=2 * TOLERANCE[dtype]
            )
            if "gradients" not in self.lacks:
                self._check_gradients(case, dtype, arrays, call)

    def test_vmap_scan_and_remat_do_not_change_results(self) -> None:
        arrays, call = self._call(self._runnable(CASES["causal"]), self.dtypes[0])
        plain = jax.jit(call)(arrays)
        several = jax.tree.map(lambda each: jnp.stack([each, each[::-1]]), arrays)
        mapped = jax.jit(jax.vmap(call))(several)
        scanned = jax.jit(lambda several: jax.lax.scan(lambda _, one: (None, call(one)), None, several)[1])(several)
        again = jax.jit(jax.checkpoint(call))(arrays)
        for found in (mapped[0], scanned[0], again, mapped[1][::-1], scanned[1][::-1]):
            np.testing.assert_allclose(
                np.asarray(found, np.float32), np.asarray(plain, np.float32), rtol=0, atol=TOLERANCE[self.dtypes[0]]
            )

    def test_model_loss_equals_the_reference_kernel(self) -> None:
        self._runnable(CASES["causal"])
        models = [cfg.set(dtypes=ax.DTypes(compute=self.dtypes[0])) for cfg in (self.config(), self.model())]
        (loss, _), (expected, _) = (loss_and_grads(cfg, tiny_batch) for cfg in models)
        np.testing.assert_allclose(loss, expected, rtol=TOLERANCE[self.dtypes[0]])

    def test_eight_devices_agree_with_one(self) -> None:
        """On a 2 x 2 x 2 mesh over rows, queries and heads. A kernel that lacks `decoding` may require equal numbers of
        queries and keys, so its mesh is 4 x 2 over rows and heads."""
        self._runnable(CASES["causal"])
        if self.platform != "cpu":
            pytest.skip("the eight devices are CPU devices")
        cfg = self.config().set(dtypes=ax.DTypes(compute=self.dtypes[0]))
        batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
        rules = {"batch": "data", "embed": "data", "head": "tensor", "kv_head": "tensor"}
        shape = {"data": 2, "context": 2, "tensor": 2}
        if "decoding" in self.lacks:
            shape = {"data": 4, "context": 1, "tensor": 2}
        rules["seq"] = "context"
        alone = Mesh(shape=dict.fromkeys(shape, 1), rules=rules)
        one, eight = steps(cfg, batch, [alone, Mesh(shape=shape, rules=rules)])
        np.testing.assert_allclose(eight["loss"], one["loss"], rtol=TOLERANCE[self.dtypes[0]])
        for path, update in one["updates"].items():
            atol = 1e-6 + 10 * TOLERANCE[self.dtypes[0]] * np.abs(update).max()
            np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)

    def _check_gradients(self, case: Case, dtype: str, arrays: Arrays, call: Callable[[Arrays], jax.Array]) -> None:
        heads_grad = np.random.default_rng(5).normal(size=formula(case, arrays).heads.shape)
        heads_grad = np.asarray(jnp.asarray(heads_grad, dtype), np.float64)  # rounded as the kernel sees it

        def scalar(arrays: Arrays) -> jax.Array:
            return (call(arrays).astype(jnp.float32) * heads_grad).sum()

        found = jax.jit(jax.grad(scalar))(arrays)
        expected = formula(case, arrays, heads_grad)
        for which, exact in expected.grads.items():
            error = np.linalg.norm(np.asarray(found[which], np.float64) - exact) / expected.roundings[which]
            assert error <= GRADIENT_TOLERANCE[dtype], (
                f"the error of the gradient of {which} in {dtype} is {error / ROUNDING[dtype]:.1f} roundings of its "
                f"terms; at most {GRADIENT_TOLERANCE[dtype] / ROUNDING[dtype]:.1f} are allowed. Its norm is "
                f"{np.linalg.norm(found[which]):.3e}, expected {np.linalg.norm(exact):.3e}"
            )

    def _kernel(self, case: Case) -> nn.AttentionKernel:
        widths = {
            "input_dim": case.heads * case.head_dim,
            "num_heads": case.heads,
            "num_kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
        }
        kernel: nn.AttentionKernel = offered_config(self, **widths).build(rngs=Rngs(0))
        return kernel

    def _request(self, case: Case, dtype: str) -> KernelRequest:
        request = KernelRequest.of(inputs_of(case, arrays_of(case, dtype)))
        return dataclasses.replace(request, platform=self.platform)

    def _with_lse(self, case: Case, *needs: str) -> Case:
        return dataclasses.replace(case, needs=(*case.needs, "lse", *needs))

    def _runnable(self, case: Case) -> Case:
        if lacking := set(case.needs) & set(self.lacks):
            pytest.skip(f"lacks contains {', '.join(sorted(lacking))}")
        if self.platform != jax.default_backend():
            pytest.skip(f"the kernel runs on {self.platform}; this is {jax.default_backend()}")
        return case

    def _call(self, case: Case, dtype: str) -> tuple[Arrays, Callable[[Arrays], jax.Array]]:
        kernel = self._kernel(case)
        return arrays_of(case, dtype), lambda arrays: kernel(inputs_of(case, arrays))[0]
