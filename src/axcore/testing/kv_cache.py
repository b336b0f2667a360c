"""The conformance suite of a KV cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.infer import Decoder, generate
from axcore.module import Rngs, functional
from axcore.nn import Attention, Causal, Mask, Normal, Repeat, SameSegment, SlidingWindow
from axcore.plugin import KVCache
from axcore.testing.models import VOCAB_SIZE, by_path, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

LENGTH = 7


class KVCacheSuite(OfferSuite):
    """Checks that decoding with a KV cache equals computing everything anew, however the tokens are split into calls.

    ```python
    class TestRing(KVCacheSuite):
        name = "ring"
        options = {"window": 4}
        window = 4
    ```

    Attributes:
        window: for a cache that forgets: the model attends in a sliding window of this size. None: plainly causal.
        max_len: of the rows that are decoded.
        exact: largest difference of logits (of order 1) from full recomputation; more for a cache that rounds.
    """

    kind = KVCache
    window: ClassVar[int | None] = None
    max_len: ClassVar[int] = 12
    exact: ClassVar[float] = 2e-5

    def model(self) -> Any:
        """A model whose tokens depend on all that they may see."""
        mask: Mask = Causal() & SameSegment()
        if self.window is not None:
            mask = Causal() & SlidingWindow(size=self.window) & SameSegment()
        cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
        return ax.select(cfg, Attention).set(mask=mask)

    def config(self) -> Any:
        return ax.select(self.model(), Attention).set(cache=offered_config(self))

    def test_one_call_equals_recomputation(self) -> None:
        np.testing.assert_allclose(self._decoded((LENGTH,)), self._recomputed(), rtol=0, atol=self.exact)

    @pytest.mark.parametrize("first", range(1, LENGTH))
    def test_every_split_into_calls_equals_recomputation(self, first: int) -> None:
        expected = self._recomputed()
        for sizes in _compositions(LENGTH - first):
            found = self._decoded((first, *sizes))
            np.testing.assert_allclose(found, expected, rtol=0, atol=self.exact, err_msg=f"calls of {first, *sizes}")

    def test_the_last_places_can_be_used(self) -> None:
        expected = self._recomputed(self.max_len)
        found = self._decoded((self.max_len - 1, 1), self.max_len)
        np.testing.assert_allclose(found, expected, rtol=0, atol=self.exact)

    def test_more_than_max_len_is_not_lost_without_a_word(self) -> None:
        if self.window is not None:
            pytest.skip("a cache that forgets has no end")
        found = self._decoded((self.max_len, 1), self.max_len + 1)
        assert np.isnan(found[:, -1]).all(), "what cannot be stored must not look like an answer"

    def test_rows_may_be_of_different_lengths(self) -> None:
        """The second row is two tokens behind; in its first call two places are padding."""
        step, params, state = self._decoder()
        ids, expected = _ids(), self._recomputed()
        behind = jnp.stack([ids[0, :5], jnp.concatenate([ids[1, :3], ids[1, :2]])])
        valid = jnp.asarray([[True] * 5, [True] * 3 + [False] * 2])
        _, state = step(params, state, behind, jnp.arange(5, dtype=jnp.int32)[None], valid)
        token = jnp.stack([ids[0, 5:6], ids[1, 3:4]])
        logits, _ = step(params, state, token, jnp.asarray([[5], [3]], jnp.int32))
        np.testing.assert_allclose(logits[0, 0], expected[0, 5], rtol=0, atol=self.exact)
        np.testing.assert_allclose(logits[1, 0], expected[1, 3], rtol=0, atol=self.exact)

    def test_a_row_can_start_over(self) -> None:
        step, params, state = self._decoder()
        places = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        _, state = step(params, state, _ids()[:, ::-1], places)
        logits, _ = step(params, state, _ids(), places)
        np.testing.assert_allclose(logits, self._recomputed(), rtol=0, atol=self.exact)

    def test_rows_do_not_mix(self) -> None:
        step, params, state = self._decoder()
        ids = _ids()
        other = ids.at[1].set((ids[1] + 1) % VOCAB_SIZE)
        places = jnp.arange(LENGTH, dtype=jnp.int32)[None]
        logits, _ = step(params, state, other, places)
        np.testing.assert_allclose(logits[0], self._recomputed()[0], rtol=0, atol=self.exact)

    def test_parameters_keep_their_paths_and_are_the_only_ones(self) -> None:
        decoder, params, _ = Decoder.of(self._model(), cache=offered_config(self), batch_size=2, max_len=self.max_len)
        assert by_path(params).keys() == by_path(functional(self._model())[1]).keys()
        assert set(by_path(params)) == set(_paths(decoder.fn.axes)), "a KV cache has no parameters"

    def test_state_names_its_batch_axis(self) -> None:
        decoder, _, state = Decoder.of(self._model(), cache=offered_config(self), batch_size=3, max_len=self.max_len)
        axes = _paths(decoder.fn.state_axes)
        assert any("batch" in names for names in axes.values()), "give DecodingState its logical axes"
        for path, array in by_path(state).items():
            named = [size for size, name in zip(array.shape, axes[path], strict=True) if name == "batch"]
            assert all(size == 3 for size in named), f"{path} {array.shape} with axes {axes[path]}"

    def test_unrolled_and_scanned_stacks_agree(self) -> None:
        cfg = ax.select(self.model(), Repeat).set(unroll=2)
        found = self._decoded((3, 4), cfg=cfg)
        np.testing.assert_allclose(found, self._recomputed(), rtol=0, atol=self.exact)

    def test_bfloat16_is_close_to_float32(self) -> None:
        cfg = self.model().set(dtypes=ax.DTypes(compute=jnp.bfloat16))
        np.testing.assert_allclose(self._decoded((3, 4), cfg=cfg), self._recomputed(), rtol=0, atol=0.15)

    def test_generating_greedily_equals_recomputation(self) -> None:
        model, prompt = self._model(), _ids()[0, :4]
        options = {"num_tokens": self.max_len - 4, "context": self.max_len, "key": jax.random.key(0), "temperature": 0}
        found = generate(model, prompt, cache=offered_config(self), **options)  # type: ignore[arg-type]
        assert found.tolist() == generate(model, prompt, **options).tolist()  # type: ignore[arg-type]

    def _model(self, cfg: Any = None) -> Any:
        return (self.model() if cfg is None else cfg).build(rngs=Rngs(0))

    def _decoder(self, cfg: Any = None) -> tuple[Any, Any, Any]:
        made = type(self).__dict__.get("_made")
        if made is None or cfg is not None:  # jitted once for all checks of a class
            decoder, params, state = Decoder.of(
                self._model(cfg), cache=offered_config(self), batch_size=2, max_len=self.max_len
            )
            made = jax.jit(decoder.__call__), params, state
            if cfg is None:
                type(self)._made = made  # type: ignore[attr-defined]
        return made

    def _decoded(self, sizes: tuple[int, ...], length: int = LENGTH, cfg: Any = None) -> np.ndarray:
        step, params, state = self._decoder(cfg)
        logits, start, ids = [], 0, _ids(length)
        for size in sizes:
            place = jnp.arange(start, start + size, dtype=jnp.int32)[None]
            each, state = step(params, state, ids[:, start : start + size], place)
            logits.append(each)
            start += size
        return np.concatenate(logits, axis=1)

    def _recomputed(self, length: int = LENGTH) -> np.ndarray:
        fn, params, state = functional(self._model())
        return np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(_ids(length)))


def _ids(length: int = LENGTH) -> jax.Array:
    return jax.random.randint(jax.random.key(4), (2, 32), 0, VOCAB_SIZE)[:, :length]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as an ordered sum."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        sizes = [1]
        for cut in cuts:
            sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
        yield tuple(sizes)


def _paths(axes: Any) -> dict[str, Any]:
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda node: isinstance(node, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
