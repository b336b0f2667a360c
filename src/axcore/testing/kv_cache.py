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
from axcore.config import has_field
from axcore.infer import Decoder, Step, generate
from axcore.module import Rngs, functional
from axcore.nn import Attention, Causal, LatentAttention, Mask, Normal, SameSegment, SlidingWindow
from axcore.plugin import KVCacheOffer
from axcore.testing.attention_cases import Slopes
from axcore.testing.models import VOCAB_SIZE, by_path, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

LENGTH = 7


class KVCacheSuite(OfferSuite):
    """Checks that decoding with a KV cache equals full recomputation, however the tokens are split into steps.

    ```python
    class TestRing(KVCacheSuite):
        name = "ring"
        options = {"window": 4}
        window = 4
    ```

    Attributes:
        window: for a cache that drops old tokens, the size of the model's sliding window. None: causal attention.
        max_len: length of the rows in the checks.
        rollback: number of tokens that can be rolled back by starting a step earlier; 0: none.
        exact: largest difference of logits (of order 1) from full recomputation. Increase it for a cache that rounds.
        approximate: whether the cache drops visible keys by design, as a heavy-hitter cache does. Logits are then only
            checked to be finite.
    """

    kind = KVCacheOffer
    window: ClassVar[int | None] = None
    max_len: ClassVar[int] = 12
    rollback: ClassVar[int] = 3
    exact: ClassVar[float] = 2e-5
    approximate: ClassVar[bool] = False

    def model(self) -> Any:
        """A model whose logits depend on every visible token."""
        mask: Mask = Causal() & SameSegment()
        if self.window is not None:
            mask = Causal() & SlidingWindow(size=self.window) & SameSegment()
        cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
        return ax.select(cfg, Attention).set(mask=mask)

    def config(self) -> Any:
        return ax.select(self.model(), Attention).set(cache=offered_config(self))

    def test_one_step_equals_recomputation(self) -> None:
        self._check(self._decoded((LENGTH,)), self._recomputed())

    @pytest.mark.parametrize("first", range(1, LENGTH))
    def test_every_split_into_steps_equals_recomputation(self, first: int) -> None:
        expected = self._recomputed()
        for sizes in _compositions(LENGTH - first):
            self._check(self._decoded((first, *sizes)), expected, f"steps of {first, *sizes}")

    def test_the_last_places_can_be_used(self) -> None:
        self._check(self._decoded((self.max_len - 1, 1), self.max_len), self._recomputed(self.max_len))

    def test_more_than_max_len_is_nan(self) -> None:
        found = self._decoded((self.max_len, 1), self.max_len + 1)
        assert np.isnan(found[:, -1]).all(), "what cannot be stored must not look like an answer"

    def test_rows_may_be_of_different_lengths(self) -> None:
        """The second row is two tokens shorter, so its first step ends with two places of padding."""
        step, params, state = self._decoder()
        ids, expected = _ids(), self._recomputed()
        behind = jnp.stack([ids[0, :5], jnp.concatenate([ids[1, :3], ids[1, :2]])])
        first = Step(behind, jnp.zeros(2, jnp.int32), lengths=jnp.asarray([5, 3]), logits_at=jnp.asarray([[4], [2]]))
        logits, state = step(params, state, first)
        self._check(logits, np.stack([expected[0, 4:5], expected[1, 2:3]]))
        token = jnp.stack([ids[0, 5:6], ids[1, 3:4]])
        logits, _ = step(params, state, Step(token, jnp.asarray([5, 3])))
        self._check(logits, np.stack([expected[0, 5:6], expected[1, 3:4]]))

    def test_a_step_may_bring_some_of_the_rows(self) -> None:
        """Row 0 of the step is slot 1, which advances while slot 0 waits."""
        step, params, state = self._decoder()
        ids, expected = _ids(), self._recomputed()
        _, state = step(params, state, Step(ids[:, :3], jnp.zeros(2, jnp.int32)))
        logits, state = step(params, state, Step(ids[1:, 3:5], jnp.asarray([3]), slots=jnp.asarray([1])))
        self._check(logits, expected[1:, 3:5])
        both = jnp.stack([ids[1, 5:7], ids[0, 3:5]])
        logits, _ = step(params, state, Step(both, jnp.asarray([5, 3]), slots=jnp.asarray([1, 0])))
        self._check(logits, np.stack([expected[1, 5:7], expected[0, 3:5]]))

    def test_tokens_can_be_taken_back(self) -> None:
        """Wrong draft tokens are rejected, and the row continues from before them."""
        if not self.rollback:
            pytest.skip("declared to take no token back")
        step, params, state = self._decoder()
        ids, expected, start = _ids(), self._recomputed(), jnp.full((2,), LENGTH - self.rollback, jnp.int32)
        wrong = (ids + 1) % VOCAB_SIZE
        _, state = step(params, state, Step(ids[:, : LENGTH - self.rollback], jnp.zeros(2, jnp.int32)))
        _, state = step(params, state, Step(wrong[:, LENGTH - self.rollback :], start))
        logits, _ = step(params, state, Step(ids[:, LENGTH - self.rollback :], start))
        self._check(logits, expected[:, LENGTH - self.rollback :])

    def test_a_row_can_start_over(self) -> None:
        step, params, state = self._decoder()
        _, state = step(params, state, Step(_ids()[:, ::-1], jnp.zeros(2, jnp.int32)))
        logits, _ = step(params, state, Step(_ids(), jnp.zeros(2, jnp.int32)))
        self._check(logits, self._recomputed())

    def test_rows_do_not_mix(self) -> None:
        step, params, state = self._decoder()
        ids = _ids()
        other = ids.at[1].set((ids[1] + 1) % VOCAB_SIZE)
        logits, _ = step(params, state, Step(other, jnp.zeros(2, jnp.int32)))
        self._check(logits[0], self._recomputed()[0])

    def test_every_option_of_attention_is_honoured(self) -> None:
        options = {"softcap": 1.5, "scale": 0.9, "sinks": Normal(stddev=1.0), "bias": Slopes.Config()}
        cfg = ax.select(self.model(), Attention).set(**options)
        self._check(self._decoded((3, 1, 3), cfg=cfg), self._recomputed(cfg=cfg))
        plain = self._recomputed()
        assert np.abs(self._recomputed(cfg=cfg) - plain).max() > 10 * self.exact, "the options change nothing"

    def test_latents_are_kept(self) -> None:
        if not has_field(offered_config(self), "value_dim"):
            pytest.skip("it has no field value_dim, so it keeps no latents")
        mask = next(node.mask for _, node in ax.config.walk(self.model()) if isinstance(node, Attention.Config))
        attention = LatentAttention.Config(
            num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, mask=mask, absorb_up_to=2
        )
        cfg = ax.select(self.model(), Attention).map(lambda _, __: attention)
        self._check(self._decoded((3, 1, 3), cfg=cfg), self._recomputed(cfg=cfg))

    def test_parameters_are_those_of_the_model(self) -> None:
        decoder, params, _ = Decoder.of(
            self._model(), cache=offered_config(self), batch_size=2, max_len=self.max_len, unstack=False
        )
        assert by_path(params).keys() == by_path(functional(self._model())[1]).keys()
        assert set(by_path(params)) == set(_paths(decoder.fn.axes)), "a KV cache has no parameters"

    def test_state_names_its_batch_axis(self) -> None:
        decoder, _, state = Decoder.of(self._model(), cache=offered_config(self), batch_size=3, max_len=self.max_len)
        axes = _paths(decoder.state_axes)
        assert any("batch" in names for names in axes.values()), "give DecodingState its logical axes"
        for path, array in by_path(state).items():
            named = [size for size, name in zip(array.shape, axes[path], strict=True) if name == "batch"]
            assert all(size == 3 for size in named), f"{path} {array.shape} with axes {axes[path]}"

    def test_a_stack_that_stays_stacked_decodes_alike(self) -> None:
        self._check(self._decoded((3, 4), unstack=False), self._recomputed())

    def test_bfloat16_is_close_to_float32(self) -> None:
        cfg = self.model().set(dtypes=ax.DTypes(compute=jnp.bfloat16))
        self._check(self._decoded((3, 4), cfg=cfg), self._recomputed(), atol=0.15)

    def test_generating_greedily_equals_recomputation(self) -> None:
        model, prompt = self._model(), _ids()[0, :4]
        options = {"num_tokens": self.max_len - 4, "context": self.max_len, "key": jax.random.key(0), "temperature": 0}
        found = generate(model, prompt, cache=offered_config(self), **options)  # type: ignore[arg-type]
        if not self.approximate:
            assert found.tolist() == generate(model, prompt, **options).tolist()  # type: ignore[arg-type]

    def _check(self, found: Any, expected: Any, message: str = "", atol: float | None = None) -> None:
        if self.approximate:
            assert np.isfinite(found).all(), message
            return
        np.testing.assert_allclose(found, expected, rtol=0, atol=atol or self.exact, err_msg=message)

    def _model(self, cfg: Any = None) -> Any:
        return (self.model() if cfg is None else cfg).build(rngs=Rngs(0))

    def _decoder(self, cfg: Any = None, unstack: bool = True) -> tuple[Any, Any, Any]:
        made = type(self).__dict__.get("_made")
        if made is None or cfg is not None or not unstack:  # compiled once per class
            decoder, params, state = Decoder.of(
                self._model(cfg), cache=offered_config(self), batch_size=2, max_len=self.max_len, unstack=unstack
            )
            made = jax.jit(decoder.__call__), params, state
            if cfg is None and unstack:
                type(self)._made = made  # type: ignore[attr-defined]
        return made

    def _decoded(
        self, sizes: tuple[int, ...], length: int = LENGTH, cfg: Any = None, unstack: bool = True
    ) -> np.ndarray:
        step, params, state = self._decoder(cfg, unstack)
        logits, start, ids = [], 0, _ids(length)
        for size in sizes:
            each, state = step(params, state, Step(ids[:, start : start + size], jnp.full((2,), start, jnp.int32)))
            logits.append(each)
            start += size
        return np.concatenate(logits, axis=1)

    def _recomputed(self, length: int = LENGTH, cfg: Any = None) -> np.ndarray:
        fn, params, state = functional(self._model(cfg))
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
