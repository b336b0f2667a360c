"""The conformance suite of numerics."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.typing import ArrayLike, DTypeLike

import axcore as ax
from axcore.config import Config
from axcore.module import GradientState, Rngs, Tree, functional, overwrite_with_gradient, to_fm32
from axcore.nn import Blocks, Embedding, Grouped, GroupedLinear, Linear, RaggedDot, Repeat, Weighted
from axcore.numerics import Numerics, stored
from axcore.parallel import Remat
from axcore.plugin import NumericsOffer, use
from axcore.testing.models import OBJECTIVE, by_path, loss_and_grads, objective, tiny_batch, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

ROWS, IN, OUT, GROUPS = 24, 48, 40, 3
SIZES = (8, 0, 16)
"""Number of rows of each group."""
KINDS = ("linear", "tied_head", "grouped", "grouped_in_blocks", "batched")
EVERY_PRODUCT = pytest.mark.parametrize("kind", KINDS)


class NumericsSuite(OfferSuite):
    """Checks of layers that fill the slot `numerics`.

    ```python
    class TestInt8(NumericsSuite):
        name = "int8"
        error = 0.02
        stored_bits = 10.0
    ```

    Attributes:
        error: largest relative error of a product of normally distributed numbers, ||found - exact|| / ||exact||.
        gradient_error: the same for gradients; None for numerics that only support inference.
        model_error: largest relative change of the loss of a small model.
        stored_error: largest relative difference between products of stored and of float weights; None: they round
            weights equally, so that only sums may be rounded differently.
        stored_bits: largest number of bits per element of a stored weight [48, 40], including scales; None for numerics
            without a stored representation.
    """

    kind = NumericsOffer
    error: ClassVar[float]
    gradient_error: ClassVar[float | None] = None
    model_error: ClassVar[float] = 0.05
    stored_bits: ClassVar[float | None] = None
    stored_error: ClassVar[float | None] = None

    def config(self) -> Config:
        """A small model, all of whose weights have the numerics."""
        return ax.pipe(tiny_model(), use(self.name, **{"where": Weighted, **self.options}))

    def filler(self) -> Config:
        """The config of the numerics."""
        return offered_config(self)

    def test_it_is_a_subclass_of_numerics(self) -> None:
        target = self.filler().target
        assert target is not None
        assert issubclass(target, Numerics)

    @EVERY_PRODUCT
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_product_is_close(self, kind: str, dtype: str) -> None:
        case = _Case(kind, self.filler(), dtype)
        found = case.call(case.params, case.x)
        assert found.dtype == jnp.dtype(dtype)
        assert _error(found, case.exact(case.params, case.x)) < self.error + (0.01 if dtype == "bfloat16" else 0)

    @pytest.mark.parametrize("widths", [(33, 40), (48, 17)], ids=str)
    @pytest.mark.parametrize("leading", [(5,), (2, 7), (1,)], ids=str)
    def test_product_of_odd_shapes_is_close(self, widths: tuple[int, int], leading: tuple[int, ...]) -> None:
        case = _Case("linear", self.filler(), widths=widths)
        x = jax.random.normal(jax.random.key(1), (*leading, widths[0]))
        assert _error(case.call(case.params, x), case.exact(case.params, x)) < self.error

    def test_product_is_rounded(self) -> None:
        case = _Case("linear", self.filler())
        found = case.call(case.params, case.x)
        assert _error(found, case.exact(case.params, case.x)) > 1e-5, "the product is not rounded"

    @pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
    def test_error_does_not_depend_on_the_weight_scale(self, scale: float) -> None:
        case = _Case("linear", self.filler())
        params = {**case.params, "weight": scale * case.params["weight"]}
        assert _error(case.call(params, case.x), case.exact(params, case.x)) < 1.5 * self.error

    @EVERY_PRODUCT
    def test_products_with_zeros_are_exact(self, kind: str) -> None:
        case = _Case(kind, self.filler())
        found = case.call(case.params, case.x.at[..., :2, :].set(0.0))
        assert np.isfinite(found).all()
        assert not np.any(found[..., :2, :])
        assert not np.any(case.call(jax.tree.map(jnp.zeros_like, case.params), case.x))

    def test_bias_is_added_after_the_product(self) -> None:
        case = _Case("linear", self.filler(), use_bias=True)
        params = {**case.params, "bias": jnp.full(OUT, 1000.0)}
        np.testing.assert_array_equal(case.call(params, jnp.zeros((2, IN))), np.full((2, OUT), 1000.0))

    def test_gathered_rows_are_close(self) -> None:
        case = _Case("tied_head", self.filler())
        ids = jnp.arange(OUT).reshape(2, -1)[:, ::-1]
        found = case.fn(case.params, case.state, ids)[0][0]
        assert _error(found, np.asarray(case.params["weight"], np.float64)[np.asarray(ids)]) < self.error

    @EVERY_PRODUCT
    def test_products_use_matrix(self, kind: str) -> None:
        """Adapters and absorbed projections use `matrix`, so it must be the weight that products use."""
        case = _Case(kind, self.filler())
        weight = case.matrix(case.params)
        assert weight.shape == case.params["weight"].shape
        found = case.call(case.params, case.x)
        assert _error(found, case.exact({**case.params, "weight": weight}, case.x)) < self.error

    @EVERY_PRODUCT
    def test_gradients_are_close(self, kind: str) -> None:
        if self.gradient_error is None:
            pytest.skip("gradient_error is None")
        case = _Case(kind, self.filler())
        y_bar = jax.random.normal(jax.random.key(2), case.call(case.params, case.x).shape)
        gradient = jax.grad(lambda params, x: (case.call(params, x) * y_bar).sum(), argnums=(0, 1))
        found = jax.jit(gradient)(case.params, case.x)
        exact = case.exact_gradients(case.params, case.x, y_bar)
        for name, mine, theirs in zip(("weight", "x"), (found[0]["weight"], found[1]), exact, strict=True):
            assert _error(mine, theirs) < self.gradient_error, f"the error of the gradient of {name} is too large"

    def test_gradients_of_gathered_rows_are_summed(self) -> None:
        if self.gradient_error is None:
            pytest.skip("gradient_error is None")
        case = _Case("tied_head", self.filler(), "bfloat16")
        ids = jnp.zeros((1, 4096), jnp.int32)
        gradient = jax.grad(lambda params: case.fn(params, case.state, ids)[0][0].astype(jnp.float32).sum())
        found = jax.jit(gradient)(case.params)["weight"]
        np.testing.assert_allclose(found[0], 4096, rtol=0.01)
        assert not np.any(found[1:])

    @EVERY_PRODUCT
    def test_stored_weights_are_small_and_give_the_same_results(self, kind: str) -> None:
        if self.stored_bits is None:
            pytest.skip("stored_bits is None")
        case = _Case(kind, self.filler())
        model, params = stored(case.cfg, case.params)
        weight, size = params["weight"], case.params["weight"].size
        assert isinstance(weight, Mapping), "the parameters still contain the float weight"
        bits = 8 * sum(leaf.nbytes for leaf in weight.values()) / size
        assert bits <= self.stored_bits, f"the stored weight has {bits} bits per element"
        wide = [name for name, leaf in by_path(params).items() if _is_wide(leaf) and leaf.size >= size]
        assert not wide, f"the parameters still contain a float copy of the weight: {wide}"
        kept = _Case(kind, self.filler().set(stored=True))
        assert jax.tree.map(_form, kept.params) == jax.tree.map(_form, params), (
            "the arrays of a built layer differ from the encoded arrays"
        )
        assert kept.cfg == model
        found, expected = kept.call(params, case.x), case.call(case.params, case.x)
        if self.stored_error is None:
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * self.error)
        else:
            assert _error(found, np.asarray(expected, np.float64)) < self.stored_error
        if kind == "tied_head":
            ids = jnp.arange(OUT)[None]
            rows = [each.fn(params, each.state, ids)[0][0] for each, params in ((kept, params), (case, case.params))]
            assert _error(rows[0], np.asarray(rows[1], np.float64)) < self.error

    def test_a_stored_model_gives_similar_results(self) -> None:
        if self.stored_bits is None:
            pytest.skip("stored_bits is None")
        cfg = self.config()
        fn, params, state = functional(cfg.build(rngs=Rngs(0)))
        model, codes = stored(cfg, params)
        kept, form, other = ax.functional(model.build(rngs=Rngs(0)))
        assert jax.tree.map(_form, form) == jax.tree.map(_form, codes)
        assert by_path(codes).keys() == by_path(jax.tree.map(len, kept.axes, is_leaf=_is_axes)).keys()
        ids = tiny_batch()["inputs"]
        called = jax.jit(lambda fn, params, state: fn(params, state, ids)[0][0], static_argnums=0)
        logits = [called(*each) for each in ((fn, params, state), (kept, codes, other))]
        assert _error(logits[1], np.asarray(logits[0], np.float64)) < self.model_error

    def test_a_model_gives_similar_results(self) -> None:
        loss, grads = loss_and_grads(self.config(), tiny_batch)
        expected, _ = loss_and_grads(tiny_model(), tiny_batch)
        np.testing.assert_allclose(loss, expected, rtol=self.model_error)
        assert loss != expected, "no product of the model was replaced"
        if self.gradient_error is not None:
            dead = [path for path, leaf in by_path(grads).items() if not np.any(leaf)]
            assert not dead, f"no gradient reaches {dead}"

    def test_every_layer_with_a_weight_has_numerics(self) -> None:
        filled = [getattr(node, "numerics", None) is not None for _, node in ax.select(self.config(), Weighted)]
        assert filled
        assert all(filled)

    def test_only_gradients_change_state(self) -> None:
        """The forward pass must not write state, since remat runs it twice."""
        fn, params, state = functional(self.config().build(rngs=Rngs(0)))
        for training in (False, True):
            run = functools.partial(fn, key=jax.random.key(0), training=training, method=OBJECTIVE.build())
            found = jax.jit(lambda params, state, run=run: run(params, state, tiny_batch())[1])(params, state)
            for path, leaf in by_path(found).items():
                np.testing.assert_array_equal(leaf, by_path(state)[path], err_msg=path)

    def test_state_is_updated_once_per_step_under_scan_and_remat(self) -> None:
        if self.gradient_error is None or not _has_gradient_state(self.config()):
            pytest.skip("the numerics have no GradientState")
        plain, scanned = (self._state_after(unroll, remat) for unroll, remat in ((2, None), (1, Remat())))
        assert plain.keys() == scanned.keys()
        for path, leaf in plain.items():
            assert np.isfinite(leaf).all(), path
            np.testing.assert_allclose(scanned[path], leaf, rtol=1e-3, err_msg=path)
        assert any(np.any(leaf != 0) for leaf in plain.values())

    def _state_after(self, unroll: int, remat: Remat | None) -> dict[str, np.ndarray]:
        cfg = ax.select(self.config(), Repeat).set(unroll=unroll, remat=remat)
        fn, params, state = functional(cfg.build(rngs=Rngs(0)))

        def after(state: Tree) -> Tree:
            gradient = jax.grad(lambda state: objective(fn, params, state, tiny_batch()), allow_int=True)
            return overwrite_with_gradient(gradient(to_fm32(state)), state)

        return by_path(jax.device_get(jax.jit(after)(state)))


class _Case:
    """One layer with the numerics under test, its parameters, and its products in NumPy."""

    def __init__(
        self,
        kind: str,
        filler: Config,
        dtype: str = "float32",
        *,
        widths: tuple[int, int] = (IN, OUT),
        **options: object,
    ):
        self.kind = kind
        input_dim, output_dim = widths
        shape: tuple[int, ...] = (2, ROWS // 2, input_dim)
        if kind == "tied_head":
            cfg: Weighted.Config = Embedding.Config(vocab_size=output_dim, output_dim=input_dim)
        elif kind == "linear":
            cfg = Linear.Config(input_dim=input_dim, output_dim=output_dim)
        else:
            cfg = GroupedLinear.Config(groups=GROUPS, input_dim=input_dim, output_dim=output_dim)
            shape = (GROUPS, ROWS, input_dim) if kind == "batched" else (ROWS, input_dim)
        self.cfg = cfg.set(numerics=filler, dtypes=ax.DTypes(compute=dtype), **options)
        self.fn, self.params, self.state = functional(self.cfg.build(rngs=Rngs(0)))
        self.x = jax.random.normal(jax.random.key(1), shape, dtype)

    def call(self, params: Tree, x: jax.Array) -> jax.Array:
        return self.product(params, self.state_after(params, x), x)

    def state_after(self, params: Tree, x: jax.Array) -> Tree:
        """The state after a training step, so that a history knows the operands. Its gradients have a mean square of
        1."""
        if not self.state:
            return self.state

        def total(state: Tree) -> jax.Array:
            y = self.product(params, state, x).astype(jnp.float32)
            return (y * jax.random.normal(jax.random.key(2), y.shape)).sum()

        gradient = jax.grad(total, allow_int=True)
        params, x = jax.lax.stop_gradient((params, x))
        update = jax.jit(lambda state: overwrite_with_gradient(gradient(to_fm32(state)), state))
        return update(self.state)

    def product(self, params: Tree, state: Tree, x: jax.Array) -> jax.Array:
        run = functools.partial(self.fn, params, state)
        if self.kind == "linear":
            return run(x)[0][0]
        if self.kind == "tied_head":
            return run(x, method="attend")[0][0]
        if self.kind == "batched":
            return run(x, method="batched")[0][0]
        sizes, block = jnp.asarray(SIZES, jnp.int32), 8 if self.kind == "grouped_in_blocks" else 1
        group = jnp.repeat(jnp.arange(GROUPS), sizes // block, total_repeat_length=ROWS // block)
        matmul = Blocks(size=block) if block > 1 else RaggedDot()
        return run(x, Grouped(sizes, group, ROWS, matmul), method="grouped")[0][0]

    def matrix(self, params: Tree) -> jax.Array:
        layer = self.fn.bind(params, self.state)
        return layer.numerics.matrix(layer.representation)

    def exact(self, params: Tree, x: ArrayLike) -> np.ndarray:
        """The product in float64."""
        x, weight = np.asarray(x, np.float64), np.asarray(params["weight"], np.float64)
        if self.kind == "tied_head":
            return x @ weight.T
        return np.einsum("gni,gio->gno", x, weight) if self.kind == "batched" else self._by_rows(x, weight)

    def _by_rows(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        if weight.ndim == 2:
            return x @ weight
        return np.stack([row @ weight[group] for row, group in zip(x, np.repeat(range(GROUPS), SIZES), strict=True)])

    def exact_gradients(self, params: Tree, x: ArrayLike, y_bar: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
        """The gradients of the weight and of x, in float64."""
        x, y_bar, weight = (np.asarray(each, np.float64) for each in (x, y_bar, params["weight"]))
        if self.kind == "tied_head":
            return np.einsum("bso,bsi->oi", y_bar, x), y_bar @ weight
        if self.kind == "linear":
            return np.einsum("bsi,bso->io", x, y_bar), y_bar @ weight.T
        if self.kind == "batched":
            return np.einsum("gni,gno->gio", x, y_bar), np.einsum("gno,gio->gni", y_bar, weight)
        weight_bar = np.zeros_like(weight)
        np.add.at(weight_bar, np.repeat(range(GROUPS), SIZES), x[:, :, None] * y_bar[:, None])
        return weight_bar, self._by_rows(y_bar, weight.swapaxes(1, 2))


def _has_gradient_state(cfg: Config) -> bool:
    module = nnx.eval_shape(lambda: cfg.build(rngs=Rngs(0)))
    return any(isinstance(node, GradientState) for _, node in nnx.iter_graph(module))


def _is_wide(leaf: jax.Array) -> bool:
    """Whether an array has floating-point numbers of more than 8 bits."""
    return jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize > 1


def _is_axes(node: object) -> bool:
    return isinstance(node, tuple)


def _form(leaf: jax.Array) -> tuple[tuple[int, ...], DTypeLike]:
    return leaf.shape, leaf.dtype


def _error(found: ArrayLike, exact: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(found, np.float64) - exact) / np.linalg.norm(exact))
