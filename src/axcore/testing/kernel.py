"""The conformance suite of an attention kernel."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import Rngs
from axcore.nn import Causal, Everything, KernelRequest, Mask, SameSegment, SlidingWindow, TokenInfo
from axcore.nn.kernels import refusal
from axcore.parallel import Mesh
from axcore.plugin import AttentionKernel, use
from axcore.testing.devices import steps
from axcore.testing.models import loss_and_grads, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

Array = np.ndarray[Any, np.dtype[Any]]
Allowed = Callable[[Array, Array, Array, Array], Array]
"""(query index, key index, query segment, key segment), broadcastable -> bool: the mask in NumPy."""


@dataclasses.dataclass(frozen=True)
class Case:
    """One call of a kernel. `needs` names what is special about it: see `KernelSuite.lacks`."""

    needs: tuple[str, ...] = ()
    mask: Mask = Causal()
    allowed: Allowed = lambda i, j, s, t: i >= j
    query_len: int = 16
    key_len: int = 16
    start: int = 0
    """The index of the first query."""
    heads: int = 4
    kv_heads: int = 4
    head_dim: int = 64
    segments: bool = False
    written: int | None = None
    """Keys that exist, where not all of `key_len` do."""
    behind: int = 0
    """Places by which the second row is behind the first."""
    scale: float | None = None
    softcap: float | None = None
    sinks: bool = False


_CAUSAL_SEGMENTS: Allowed = lambda i, j, s, t: (i >= j) & (s == t)  # noqa: E731

CASES = {
    "causal": Case(),
    "causal, one document a row": Case(mask=Causal() & SameSegment()),
    "every key": Case(("full",), mask=Everything(), allowed=lambda i, j, s, t: (i == i) & (j == j)),
    "one token": Case(("odd_lengths",), query_len=1, key_len=1),
    "odd length": Case(("odd_lengths",), query_len=37, key_len=37),
    "beyond a block": Case(("long",), query_len=257, key_len=257, heads=2, kv_heads=1),
    "groups of two": Case(("grouped",), kv_heads=2),
    "one kv head": Case(("grouped",), kv_heads=1),
    "six heads on three": Case(("grouped",), heads=6, kv_heads=3),
    "head_dim 96": Case(("head_dim_96",), head_dim=96),
    "head_dim 128": Case(("head_dim_128",), head_dim=128),
    "head_dim 192": Case(("head_dim_192",), head_dim=192),
    "head_dim 256": Case(("head_dim_256",), head_dim=256),
    "documents": Case(("segments",), mask=Causal() & SameSegment(), allowed=_CAUSAL_SEGMENTS, segments=True),
    "window": Case(
        ("windows",), mask=Causal() & SlidingWindow(size=5), allowed=lambda i, j, s, t: (i >= j) & (i - j < 5)
    ),
    "window of one": Case(("windows",), mask=Causal() & SlidingWindow(size=1), allowed=lambda i, j, s, t: i == j),
    "window and documents": Case(
        ("windows", "segments"),
        mask=Causal() & SameSegment() & SlidingWindow(size=3),
        allowed=lambda i, j, s, t: (i >= j) & (i - j < 3) & (s == t),
        segments=True,
    ),
    "either of two masks": Case(
        ("any_mask", "segments"),
        mask=Causal() | SameSegment(),
        allowed=lambda i, j, s, t: (i >= j) | (s == t),
        segments=True,
    ),
    "scale": Case(("scale",), scale=0.3),
    "softcap": Case(("softcap",), softcap=2.0),
    "scale and softcap": Case(("scale", "softcap"), scale=0.3, softcap=2.0),
    "sinks": Case(("sinks",), sinks=True, kv_heads=2),
    "sinks and softcap": Case(("sinks", "softcap"), sinks=True, softcap=3.0),
    "next token": Case(("decoding",), query_len=1, key_len=12, start=8, written=9),
    "part of a prompt": Case(("decoding",), query_len=3, key_len=12, start=4, written=7, kv_heads=2),
    "rows at different places": Case(("decoding",), query_len=2, key_len=12, start=7, written=9, behind=4),
    "sinks while decoding": Case(("decoding", "sinks"), query_len=1, key_len=12, start=8, written=9, sinks=True),
    "part of a prompt in a window": Case(
        ("decoding", "windows"),
        mask=Causal() & SlidingWindow(size=4),
        allowed=lambda i, j, s, t: (i >= j) & (i - j < 4),
        query_len=3,
        key_len=12,
        start=4,
        written=7,
    ),
}
CAPABILITIES = frozenset(need for case in CASES.values() for need in case.needs) | {"gradients"}
TOLERANCE = {"float32": 3e-5, "bfloat16": 2e-2, "float16": 4e-3}
"""Of the outputs, against float64 on the same rounded inputs; outputs are of order 1."""


class KernelSuite(OfferSuite):
    """Checks of an attention kernel against the formula in NumPy float64, forward and backward.

    ```python
    class TestMyKernel(KernelSuite):
        name = "my-kernel"
        lacks = {"sinks", "softcap"}
    ```

    Every case that the kernel does not lack must be supported and right; every case that it lacks must be refused by
    `supports` with a reason, so that another kernel can be chosen.

    Attributes:
        lacks: capabilities that the kernel does not claim, of `CAPABILITIES`.
        dtypes: number types of q, k and v that it takes.
        platform: where it runs. Elsewhere only what it supports is checked, and the numbers are skipped.
    """

    kind = AttentionKernel
    lacks: ClassVar[frozenset[str] | set[str]] = frozenset()
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    platform: ClassVar[str] = "cpu"

    def model(self) -> Any:
        """A model whose attentions the kernel can compute."""
        return tiny_model()

    def config(self) -> Any:
        return ax.pipe(self.model(), use(self.name, **self.options))

    def test_lacks_names_capabilities(self) -> None:
        assert set(self.lacks) <= CAPABILITIES, f"unknown: {set(self.lacks) - CAPABILITIES}; known: {CAPABILITIES}"

    @pytest.mark.parametrize("name", CASES)
    def test_supports_what_it_claims_and_refuses_the_rest_with_a_reason(self, name: str) -> None:
        case, kernel = CASES[name], self._kernel(CASES[name])
        lacking = set(case.needs) & set(self.lacks)
        for dtype in self.dtypes:
            reason = refusal(kernel, self._request(case, dtype))
            if lacking:
                assert isinstance(reason, str), f"it lacks {lacking}; supports() must say so"
                assert len(reason.split()) > 2, f"a reason is a few words, not {reason!r}"
            else:
                assert reason is None, f"it does not list this in lacks, but refuses it: {reason}"

    @pytest.mark.parametrize("name", CASES)
    def test_outputs_are_those_of_the_formula(self, name: str) -> None:
        case = self._runnable(CASES[name])
        for dtype in self.dtypes:
            arrays, call = self._call(case, dtype)
            found = jax.jit(call)(*arrays)
            assert found.dtype == jnp.dtype(dtype)
            expected = formula(case, [np.asarray(each, np.float64) for each in arrays])
            assert found.shape == expected.shape
            np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=0, atol=TOLERANCE[dtype])

    @pytest.mark.parametrize("name", CASES)
    def test_gradients_are_those_of_the_formula(self, name: str) -> None:
        if "gradients" in self.lacks:
            pytest.skip("declared to have no backward pass")
        case = self._runnable(CASES[name])
        arrays, call = self._call(case, self.dtypes[0])
        random = np.random.default_rng(5)
        wide = [np.asarray(each, np.float64) for each in arrays]
        weights = random.normal(size=formula(case, wide).shape)

        def scalar(*arrays: jax.Array) -> jax.Array:
            return (call(*arrays).astype(jnp.float32) * weights).sum()

        grads = jax.jit(jax.grad(scalar, argnums=tuple(range(len(arrays)))))(*arrays)
        for which, grad in enumerate(grads):
            direction = random.normal(size=grad.shape)
            step = 1e-4 * direction  # the error of a central difference is its square
            ahead, behind = (
                (formula(case, [*wide[:which], wide[which] + sign * step, *wide[which + 1 :]]) * weights).sum()
                for sign in (1, -1)
            )
            slope = (np.asarray(grad, np.float64) * direction).sum()
            size = np.linalg.norm(np.asarray(grad, np.float64)) + np.sqrt(grad.size) * 1e-2
            # A sum over random directions: rounding errors of the entries add up like their root mean square.
            np.testing.assert_allclose(
                slope, (ahead - behind) / 2e-4, rtol=0, atol=20 * TOLERANCE[self.dtypes[0]] * size
            )

    def test_mapped_scanned_and_recomputed_it_is_the_same(self) -> None:
        arrays, call = self._call(self._runnable(CASES["causal"]), self.dtypes[0])
        plain = jax.jit(call)(*arrays)
        several = tuple(jnp.stack([each, each[::-1]]) for each in arrays)
        mapped = jax.jit(jax.vmap(call))(*several)
        scanned = jax.jit(lambda *all: jax.lax.scan(lambda _, one: (None, call(*one)), None, all)[1])(*several)
        again = jax.jit(jax.checkpoint(call))(*arrays)
        for found in (mapped[0], scanned[0], again, mapped[1][::-1], scanned[1][::-1]):
            np.testing.assert_allclose(
                np.asarray(found, np.float32), np.asarray(plain, np.float32), rtol=0, atol=TOLERANCE[self.dtypes[0]]
            )

    def test_in_a_model_it_is_as_good_as_the_reference(self) -> None:
        self._runnable(CASES["causal"])
        models = [cfg.set(dtypes=ax.DTypes(compute=self.dtypes[0])) for cfg in (self.config(), self.model())]
        (loss, _), (expected, _) = (loss_and_grads(cfg, tiny_batch) for cfg in models)
        np.testing.assert_allclose(loss, expected, rtol=TOLERANCE[self.dtypes[0]])

    def test_eight_devices_agree_with_one(self) -> None:
        self._runnable(CASES["causal"])
        if self.platform != "cpu":
            pytest.skip("eight devices are made of CPU cores")
        cfg = self.config().set(dtypes=ax.DTypes(compute=self.dtypes[0]))
        batch = jax.tree.map(np.asarray, tiny_batch(rows=8))
        rules: Mapping[str, Any] = {"batch": ("data", "fsdp"), "embed": "fsdp", "head": "tensor", "kv_head": "tensor"}
        shape = {"data": 2, "fsdp": 2, "tensor": 2}
        alone = Mesh(shape=dict.fromkeys(shape, 1), rules=rules)
        one, eight = steps(cfg, batch, [alone, Mesh(shape=shape, rules=rules)])
        np.testing.assert_allclose(eight["loss"], one["loss"], rtol=TOLERANCE[self.dtypes[0]])
        for path, update in one["updates"].items():
            atol = 1e-6 + 10 * TOLERANCE[self.dtypes[0]] * np.abs(update).max()
            np.testing.assert_allclose(eight["updates"][path], update, rtol=0, atol=atol, err_msg=path)

    def _kernel(self, case: Case) -> Any:
        widths = {
            "input_dim": case.heads * case.head_dim,
            "num_heads": case.heads,
            "num_kv_heads": case.kv_heads,
            "head_dim": case.head_dim,
        }
        return offered_config(self, **widths).build(rngs=Rngs(0))

    def _request(self, case: Case, dtype: str) -> KernelRequest:
        arrays, tokens = _arrays(case, dtype), _tokens(case)
        q, k, v = arrays[:3]
        request = KernelRequest.of(q, k, v, case.mask, *tokens, **_options(case, arrays))
        return dataclasses.replace(request, platform=self.platform)

    def _runnable(self, case: Case) -> Case:
        if lacking := set(case.needs) & set(self.lacks):
            pytest.skip(f"declared to lack {', '.join(sorted(lacking))}")
        if self.platform != jax.default_backend():
            pytest.skip(f"the kernel runs on {self.platform}; this is {jax.default_backend()}")
        return case

    def _call(self, case: Case, dtype: str) -> tuple[tuple[jax.Array, ...], Callable[..., jax.Array]]:
        kernel, arrays, tokens = self._kernel(case), _arrays(case, dtype), _tokens(case)

        def call(*arrays: jax.Array) -> jax.Array:
            options = {name: value for name, value in _options(case, arrays).items() if value is not None}
            return kernel(*arrays[:3], case.mask, *tokens, **options)

        return arrays, call


def formula(case: Case, arrays: Sequence[Array]) -> Array:
    """softmax(softcap(scale q k^T) under the mask, sinks beside it) v, in float64, of q, k, v and perhaps sinks."""
    q, k, v, *rest = arrays
    group = case.heads // case.kv_heads
    k, v = np.repeat(k, group, axis=2), np.repeat(v, group, axis=2)
    scale = case.head_dim**-0.5 if case.scale is None else case.scale
    logits = scale * np.einsum("bshd,bthd->bhst", q, k)
    if case.softcap is not None:
        logits = case.softcap * np.tanh(logits / case.softcap)
    logits = np.where(_allowed(case)[:, None], logits, -np.inf)
    highest = logits.max(-1, keepdims=True)
    weights = np.exp(logits - highest)
    total = weights.sum(-1, keepdims=True)
    if rest:
        total = total + np.exp(rest[0][:, None, None] - highest)
    return np.einsum("bhst,bthd->bshd", weights / total, v)


BATCH = 2


def _segments(case: Case) -> Array:
    """[batch, key_len]: documents of random lengths."""
    starts = np.random.default_rng(3).random((BATCH, case.key_len)) < 0.3
    return np.cumsum(starts, axis=1)


def _places(case: Case) -> Array:
    """[batch, query_len]: the index of each query."""
    return np.arange(case.query_len) + case.start - np.array([[0], [case.behind]])


def _exists(case: Case) -> Array:
    """[batch, key_len]: which keys were written."""
    written = case.key_len if case.written is None else case.written
    return np.arange(case.key_len) < written - np.array([[0], [case.behind]])


def _allowed(case: Case) -> Array:
    places = _places(case)
    segments = _segments(case) if case.segments else np.zeros((BATCH, case.key_len), int)
    asking = np.take_along_axis(segments, places, axis=1)
    allowed = case.allowed(
        places[:, :, None], np.arange(case.key_len)[None, None], asking[:, :, None], segments[:, None]
    )
    return np.broadcast_to(allowed & _exists(case)[:, None], (BATCH, case.query_len, case.key_len))


@functools.cache
def _arrays(case: Case, dtype: str) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(1)
    shapes = [
        (BATCH, case.query_len, case.heads, case.head_dim),
        (BATCH, case.key_len, case.kv_heads, case.head_dim),
        (BATCH, case.key_len, case.kv_heads, case.head_dim),
    ]
    arrays = [jnp.asarray(random.normal(size=shape), dtype) for shape in shapes]
    if case.sinks:
        arrays.append(jnp.asarray(random.normal(size=case.heads), jnp.float32))
    return tuple(arrays)


def _options(case: Case, arrays: tuple[jax.Array, ...]) -> dict[str, Any]:
    return {"scale": case.scale, "softcap": case.softcap, "sinks": arrays[3] if case.sinks else None}


def _tokens(case: Case) -> tuple[TokenInfo, TokenInfo]:
    index = jnp.arange(case.key_len, dtype=jnp.int32)[None]
    segments = _segments(case)
    places = _places(case)
    asking = jnp.asarray(np.take_along_axis(segments, places, axis=1), jnp.int32) if case.segments else None
    place = jnp.asarray(places if case.behind else places[:1], jnp.int32)
    written = None if case.written is None else jnp.asarray(_exists(case))
    key = TokenInfo(index, index, jnp.asarray(segments, jnp.int32) if case.segments else None, written)
    return TokenInfo(place, place, asking), key
