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
from axcore.infer import Engine
from axcore.module import Rngs
from axcore.nn import KernelRequest, attend_in_parts, refusal
from axcore.nn.attention.sharded import readable
from axcore.nn.tokens import Phase
from axcore.parallel import Mesh
from axcore.plugin import AttentionKernelOffer, use
from axcore.testing.attention_cases import (
    CASES,
    Arrays,
    Case,
    Expected,
    arrays_of,
    by_head,
    formula,
    inputs_of,
    segments_of,
)
from axcore.testing.attention_views import VIEWS
from axcore.testing.devices import steps
from axcore.testing.engine import check_logprobs
from axcore.testing.models import loss_and_grads, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

CAPABILITIES = frozenset(need for case in CASES.values() for need in case.needs) | {"gradients", "lse"}
ROUNDING = {dtype: float(jnp.finfo(dtype).eps) / 2 for dtype in ("float32", "bfloat16", "float16")}
"""Largest relative error of rounding to a dtype."""
ERRORS = 4
"""How many times the error of `unit_error` in each term a result may have."""
DIRECTIONS = 3
"""Number of random directions in which gradients are compared."""


def unit_error(dtype: str, expected: Expected) -> float:
    """The relative error of a term of a kernel that computes in float32 and rounds its factors to `dtype`.

    It is `u + 16 v (L + sqrt(n))`, with the unit roundoff u of `dtype` and v of float32, the largest logit L and the
    number of keys n; see `Expected.arithmetic`. Approximate exponentials are why v has the factor 16. Errors of terms
    are random, so those of a sum add in the L2 norm (Higham 2002, Accuracy and Stability of Numerical Algorithms,
    section 2.8).
    """
    return ROUNDING[dtype] + 16 * ROUNDING["float32"] * expected.arithmetic


class KernelSuite(OfferSuite):
    """Checks of an attention kernel against the formula in NumPy float64, forward and backward.

    ```python
    class TestMyKernel(KernelSuite):
        name = "my-kernel"
        lacks = {"sinks", "softcap"}
    ```

    The kernel must give correct results in all cases that require no capability in `lacks`. It must reject the others,
    by omitting the option from `takes` or by returning a reason from `supports`, so that another kernel can be chosen.

    Tolerances follow from `unit_error` and from the number and size of the terms of each sum. In bfloat16, the
    gradients of a kernel that computes in float32 and rounds its results have up to 0.8 of these errors, those of one
    that also rounds the factors of its products up to 1, and 4 are allowed. Random errors cancel in the direction of
    the exact gradient, along which both have up to 0.4 and 1 is allowed: 0.4% of the size of the terms.

    Attributes:
        lacks: the members of `CAPABILITIES` that the kernel does not have.
        dtypes: the dtypes of q, k and v that the kernel supports.
        platform: the platform that the kernel runs on. On other platforms the suite only checks `supports`.
        phase: the phase of the calls. With another phase than `train`, no model is trained with the kernel.
    """

    kind = AttentionKernelOffer
    lacks: ClassVar[frozenset[str] | set[str]] = frozenset()
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    platform: ClassVar[str] = "cpu"
    phase: ClassVar[Phase] = "train"

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
            self._check_heads(dtype, jax.jit(call)(arrays), formula(case, arrays))

    @pytest.mark.parametrize("name", CASES)
    def test_gradients_equal_the_formula(self, name: str) -> None:
        if "gradients" in self.lacks:
            pytest.skip("lacks contains gradients")
        case = self._runnable(CASES[name])
        for dtype in self.dtypes:
            arrays, call = self._call(case, dtype)
            self._check_gradients(case, dtype, arrays, call)

    @pytest.mark.parametrize(
        "name", ["causal", "very negative logits", "two heads per kv head", "documents", "window", "sinks"]
    )
    def test_lse_equals_the_formula(self, name: str) -> None:
        case = self._runnable(self._with_lse(CASES[name]))
        for dtype in self.dtypes:
            arrays, kernel = arrays_of(case, dtype), self._kernel(case)
            inputs = self._inputs(case, arrays, return_lse=True)
            heads, lse = jax.jit(kernel.__call__)(inputs)
            expected = formula(case, arrays)
            assert lse.dtype == jnp.float32, "lse must be float32: merging in bfloat16 loses precision"
            np.testing.assert_allclose(lse, expected.lse, rtol=0, atol=ERRORS * unit_error("float32", expected))
            self._check_heads(dtype, heads, expected)

    @pytest.mark.parametrize("name", ["causal", "two heads per kv head", "sinks"])
    def test_merging_two_parts_of_the_keys_equals_one_call(self, name: str) -> None:
        case = self._runnable(self._with_lse(CASES[name], "decoding"))
        for dtype in self.dtypes:
            arrays, kernel = arrays_of(case, dtype), self._kernel(case)

            def call(arrays: Arrays, kernel: nn.AttentionKernel = kernel, case: Case = case) -> jax.Array:
                inputs = self._inputs(case, arrays)
                kv, half = inputs.plain, case.key_len // 2
                parts = [jax.tree.map(lambda x, at=at: x[:, at], kv) for at in (slice(half), slice(half, None))]
                with ax.module.root(kernel, key=None, training=True):
                    return attend_in_parts(kernel, inputs, parts)[0]

            self._check_heads(dtype, jax.jit(call)(arrays), formula(case, arrays), errors=2 * ERRORS)
            if "gradients" not in self.lacks:
                self._check_gradients(case, dtype, arrays, call)

    @pytest.mark.parametrize("view", VIEWS)
    def test_views_equal_the_formula(self, view: str) -> None:
        """The core gathers the keys and values of a view that the kernel does not list in `views`."""
        case = CASES["rows at different positions"]
        case = self._runnable(dataclasses.replace(case, needs=(*case.needs, "grouped"), kv_heads=2))
        kernel = self._kernel(case)
        for dtype in self.dtypes:
            arrays = arrays_of(case, dtype)
            inputs = self._inputs(case, arrays)
            inputs = readable(kernel, inputs.replace(kv=VIEWS[view](inputs.plain)))
            reason = refusal(kernel, dataclasses.replace(KernelRequest.of(inputs), platform=self.platform))
            assert reason is None, f"the kernel must support a {type(inputs.kv).__name__}; it returns: {reason}"
            found = jax.jit(kernel.__call__)(inputs)[0]
            self._check_heads(dtype, found, formula(case, arrays | {"k": inputs.plain.k, "v": inputs.plain.v}))

    def test_documents_do_not_change_each_other(self) -> None:
        """Changing the first document of a row leaves the heads and gradients of the others bitwise equal."""
        case = self._runnable(dataclasses.replace(CASES["documents"], query_len=64, key_len=64))
        first = segments_of(case) == segments_of(case)[:, :1]
        for dtype in self.dtypes:
            arrays, call = self._call(case, dtype)

            def results(arrays: Arrays, call: Callable[[Arrays], jax.Array] = call) -> tuple[jax.Array, Arrays]:
                if "gradients" in self.lacks:
                    return call(arrays), {}
                heads, pull = jax.vjp(call, arrays)
                return heads, pull(jnp.cos(jnp.arange(heads.size)).reshape(heads.shape).astype(heads.dtype))[0]

            run = jax.jit(results)
            changed = {name: jnp.where(first[..., None, None], 3 * x + 1, x) for name, x in arrays.items()}
            one, two = run(arrays), run(changed)
            assert (np.asarray(one[0])[first] != np.asarray(two[0])[first]).any()
            for before, after in zip(jax.tree.leaves(one), jax.tree.leaves(two), strict=True):
                np.testing.assert_array_equal(np.asarray(before)[~first], np.asarray(after)[~first])

    def test_a_query_without_keys_gives_finite_numbers(self) -> None:
        """The second row of a cache is empty. Its heads are undefined; its log-sum-exp must not count in a merge."""
        case = self._runnable(
            dataclasses.replace(CASES["rows at different positions"], start=4, written=3, behind=3, key_len=16)
        )
        return_lse = "lse" not in self.lacks
        for dtype in self.dtypes:
            arrays, kernel = arrays_of(case, dtype), self._kernel(case)

            def call(
                arrays: Arrays, kernel: nn.AttentionKernel = kernel
            ) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
                heads, lse = kernel(self._inputs(case, arrays, return_lse))
                return heads.astype(jnp.float32).sum(), (heads, lse)

            if "gradients" in self.lacks:
                grads, (heads, lse) = {}, jax.jit(call)(arrays)[1]
            else:
                grads, (heads, lse) = jax.jit(jax.grad(call, has_aux=True))(arrays)
            for name, found in {"heads": heads, **grads}.items():
                which = name if name == "heads" else f"the gradient of {name}"
                assert np.isfinite(np.asarray(found, np.float32)).all(), f"{which} in {dtype} is not finite"
            if lse is not None:
                assert (np.asarray(lse)[1] < -1e30).all(), (
                    f"the lse of a query without keys must be below -1e30, as merges ignore it then, got {lse[1]}. "
                    "Use jnp.finfo(jnp.float32).min for the logits of masked keys"
                )

    def test_vmap_scan_and_remat_do_not_change_results(self) -> None:
        arrays, call = self._call(self._runnable(CASES["causal"]), self.dtypes[0])
        plain = jax.jit(call)(arrays)
        several = jax.tree.map(lambda each: jnp.stack([each, each[::-1]]), arrays)
        mapped = jax.jit(jax.vmap(call))(several)
        scanned = jax.jit(lambda several: jax.lax.scan(lambda _, one: (None, call(one)), None, several)[1])(several)
        again = jax.jit(jax.checkpoint(call))(arrays)
        for found in (mapped[0], scanned[0], again, mapped[1][::-1], scanned[1][::-1]):
            atol = 5 * ROUNDING[self.dtypes[0]] + 3e-5
            np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(plain, np.float32), rtol=0, atol=atol)

    def test_model_loss_equals_the_reference_kernel(self) -> None:
        self._skip_unless_trained()
        self._runnable(CASES["causal"])
        models = [cfg.set(dtypes=ax.DTypes(compute=self.dtypes[0])) for cfg in (self.config(), self.model())]
        (loss, _), (expected, _) = (loss_and_grads(cfg, tiny_batch) for cfg in models)
        np.testing.assert_allclose(loss, expected, rtol=5 * ROUNDING[self.dtypes[0]] + 3e-5)

    def test_eight_devices_agree_with_one(self) -> None:
        """On a 2 x 2 x 2 mesh over rows, queries and heads. A kernel that lacks `decoding` may require equal numbers of
        queries and keys, so its mesh is 4 x 2 over rows and heads."""
        self._skip_unless_trained()
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
        np.testing.assert_allclose(eight["loss"], one["loss"], rtol=5 * ROUNDING[self.dtypes[0]] + 3e-5)
        for path, update in one["updates"].items():
            atol = 1e-6 + (50 * ROUNDING[self.dtypes[0]] + 3e-4) * np.abs(update).max()
            np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)

    def test_an_engine_gives_the_log_probabilities_of_training(self) -> None:
        """Trained with the reference kernel. Calls of the engine that the kernel does not support run that kernel."""
        if "decoding" in self.lacks:
            pytest.skip("lacks contains decoding")
        self._runnable(CASES["rows at different positions"])
        dtype = self.dtypes[0]
        trained = ax.select(self.model(), "embedding").set(init=nn.Normal(stddev=1.0))
        trained = trained.set(dtypes=ax.DTypes(compute=dtype))
        kernel = offered_config(self)
        assert isinstance(kernel, nn.AttentionKernel.Config)
        order = nn.ChooseKernel.Config(order=(kernel, nn.ReferenceKernel.Config()))
        decoded = ax.select(trained, nn.Attention).put(kernel=order)
        cfg = Engine.Config(max_len=24, max_rows=2, step_tokens=16)
        models = [each.build(rngs=Rngs(0)) for each in (decoded, trained)]
        bound = 2e-5 + 100 * ROUNDING[dtype]
        check_logprobs(models[0], cfg, trained=models[1], bound=bound, lengths=(18, 3), max_tokens=4)

    def _check_heads(self, dtype: str, found: jax.Array, expected: Expected, errors: float = ERRORS) -> None:
        assert (found.dtype, found.shape) == (jnp.dtype(dtype), expected.heads.shape)
        error = np.abs(np.asarray(found, np.float64) - expected.heads)
        most = errors * unit_error(dtype, expected) * expected.heads_rounding + 1e-30
        worst = np.unravel_index(np.nanargmax(error / most), error.shape) if np.isfinite(error).all() else None
        assert worst is not None, f"{(~np.isfinite(error)).sum()} numbers of the heads in {dtype} are not finite"
        assert error[worst] <= most[worst], (
            f"the error of the heads in {dtype} at (row, query, head, feature) {tuple(map(int, worst))} is "
            f"{error[worst]:.2e}; at most {most[worst]:.2e} is allowed"
        )

    def _check_gradients(self, case: Case, dtype: str, arrays: Arrays, call: Callable[[Arrays], jax.Array]) -> None:
        shape = formula(case, arrays).heads.shape
        gradients = jax.jit(lambda arrays, heads_grad: jax.vjp(call, arrays)[1](heads_grad)[0])
        for seed in range(DIRECTIONS):
            heads_grad = jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)
            found, expected = gradients(arrays, heads_grad), formula(case, arrays, np.asarray(heads_grad, np.float64))
            unit = unit_error(dtype, expected)
            for which, grad in expected.grads.items():
                exact, rounding = by_head(grad), expected.roundings[which]
                wrong = by_head(np.asarray(found[which], np.float64)) - exact
                error = np.linalg.norm(wrong, axis=1) / (unit * rounding)
                assert (error <= ERRORS).all(), (
                    f"the errors of the gradient of {which} in {dtype} are {np.round(error, 1)} roundings of its terms "
                    f"for each head; at most {ERRORS} are allowed"
                )
                size = np.linalg.norm(exact, axis=1)
                error = np.abs((wrong * exact).sum(1)) / (unit * rounding * size + 1e-30)
                assert (error <= 1).all(), (
                    f"the gradient of {which} in {dtype} has the wrong scale: the errors along the exact gradient are "
                    f"{np.round(error, 1)} roundings of its terms for each head; at most 1 is allowed"
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
        request = KernelRequest.of(self._inputs(case, arrays_of(case, dtype)))
        return dataclasses.replace(request, platform=self.platform)

    def _inputs(self, case: Case, arrays: Arrays, return_lse: bool = False) -> nn.AttentionInputs:
        return inputs_of(case, arrays, return_lse).replace(phase=self.phase)

    def _skip_unless_trained(self) -> None:
        if self.phase != "train":
            pytest.skip(f"the kernel supports {self.phase}, not training")

    def _with_lse(self, case: Case, *needs: str) -> Case:
        return dataclasses.replace(case, needs=(*case.needs, "lse", *needs))

    def _runnable(self, case: Case) -> Case:
        if lacking := set(case.needs) & set(self.lacks):
            pytest.skip(f"lacks contains {', '.join(sorted(lacking))}")
        if self.platform != jax.default_backend():
            pytest.skip(f"the kernel requires {self.platform}, got {jax.default_backend()}")
        return case

    def _call(self, case: Case, dtype: str) -> tuple[Arrays, Callable[[Arrays], jax.Array]]:
        kernel = self._kernel(case)
        return arrays_of(case, dtype), lambda arrays: kernel(self._inputs(case, arrays))[0]
