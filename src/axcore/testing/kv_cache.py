"""The conformance suite of a KV cache."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import ArrayLike

import axcore as ax
from axcore import nn
from axcore.config import Config, has_field
from axcore.infer import Decoder, Engine, Step, generate
from axcore.module import Layer, Rngs, Tree, abstract, functional
from axcore.nn import Attention, Causal, LatentAttention, Mask, Normal, SameSegment, SlidingWindow, for_decoding
from axcore.plugin import KVCacheOffer
from axcore.testing.attention_cases import Slopes
from axcore.testing.engine import check_logprobs
from axcore.testing.models import VOCAB_SIZE, by_path, tiny_model
from axcore.testing.offer import OfferSuite, offered_config

LENGTH = 7
CompiledDecoder = tuple[Callable[[Tree, Tree, Any], tuple[Any, Tree]], Tree, Tree]  # Any: see Decoder.__call__
"""(compiled call of a decoder, parameters, initial state)."""


class KVCacheSuite(OfferSuite):
    """Checks that decoding with a KV cache equals full recomputation for every split of the tokens into steps.

    ```python
    class TestRing(KVCacheSuite):
        name = "ring"
        options = {"window": 4}
        window = 4
    ```

    Attributes:
        window: for a cache that drops old tokens, the size of the model's sliding window. None: causal attention.
        max_len: length of the rows in the checks.
        rollback: number of tokens that a step can roll back by starting before the end of its row; 0: none.
        exact: largest error of the logits, which are of order 1. Increase it for a cache that rounds.
        keeps: for a cache that drops visible keys by design, as a heavy-hitter cache does, the number of tokens up to
            which it keeps all keys. The logits of the first `keeps` tokens of a row have an error of at most `exact`,
            those of later tokens a root mean square error of at most `lossy`. None: the cache keeps all visible keys.
        lossy: see `keeps`. Both bounds must reject a cache that keeps no keys; see
            `test_the_bounds_reject_a_cache_that_keeps_nothing`.
        row_axis: the logical axis of the arrays that store rows. `PagedCacheSuite`, for caches with pages, sets it.
    """

    kind = KVCacheOffer
    window: ClassVar[int | None] = None
    max_len: ClassVar[int] = 12
    rollback: ClassVar[int] = 3
    exact: ClassVar[float] = 2e-5
    keeps: ClassVar[int | None] = None
    lossy: ClassVar[float] = 0.0
    row_axis: ClassVar[str] = "batch"
    _made: ClassVar[CompiledDecoder]

    def model(self) -> Config:
        """A model whose logits depend on every visible token."""
        mask: Mask = Causal() & SameSegment()
        if self.window is not None:
            mask = Causal() & SlidingWindow(size=self.window) & SameSegment()
        cfg = ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))
        return ax.select(cfg, Attention).set(mask=mask)

    def config(self) -> Config:
        return ax.select(self.model(), Attention).set(cache=self._cache())

    def test_the_bounds_reject_a_cache_that_keeps_nothing(self) -> None:
        """A bound that accepts logits without any earlier token checks nothing."""
        alone = ax.select(self.model(), Attention).set(mask=Causal() & SlidingWindow(size=1) & SameSegment())
        error = self._recomputed(cfg=alone) - self._recomputed()
        largest, whole = np.abs(error).max(), _rms(error)
        assert 3 * self.exact < largest, f"exact={self.exact} must be below {largest / 3:.2g}"
        if self.keeps is not None:
            assert self.lossy < 0.75 * whole, f"lossy={self.lossy} must be below {0.75 * whole:.2g}"
            assert 0 < self.keeps < LENGTH, f"keeps={self.keeps} must be from 1 to {LENGTH - 1}; see options"

    def test_one_step_equals_recomputation(self) -> None:
        self._check(self._decoded((LENGTH,)), self._recomputed())

    @pytest.mark.parametrize("first", range(1, LENGTH))
    def test_every_split_into_steps_equals_recomputation(self, first: int) -> None:
        expected = self._recomputed()
        for sizes in _compositions(LENGTH - first):
            self._check(self._decoded((first, *sizes)), expected, f"steps of {first, *sizes}")

    def test_rows_can_be_filled_up_to_max_len(self) -> None:
        self._check(self._decoded((self.max_len - 1, 1), self.max_len), self._recomputed(self.max_len))

    def test_logits_beyond_max_len_are_nan(self) -> None:
        found = self._decoded((self.max_len, 1), self.max_len + 1)
        assert np.isnan(found[:, -1]).all(), "logits of tokens that are not stored must be NaN"

    def test_rows_may_have_different_lengths(self) -> None:
        """The second row is two tokens shorter, so its first step ends with two tokens of padding."""
        step, params, state = self._decoder()
        ids, expected = tokens(), self._recomputed()
        behind = jnp.stack([ids[0, :5], jnp.concatenate([ids[1, :3], ids[1, :2]])])
        first = Step(behind, jnp.zeros(2, jnp.int32), lengths=jnp.asarray([5, 3]), logits_at=jnp.asarray([[4], [2]]))
        logits, state = step(params, state, first)
        self._check(logits, np.stack([expected[0, 4:5], expected[1, 2:3]]), start=[[4], [2]])
        token = jnp.stack([ids[0, 5:6], ids[1, 3:4]])
        logits, _ = step(params, state, Step(token, jnp.asarray([5, 3])))
        self._check(logits, np.stack([expected[0, 5:6], expected[1, 3:4]]), start=[[5], [3]])

    def test_a_step_may_contain_some_of_the_rows(self) -> None:
        """Row 0 of the step is slot 1, which advances while slot 0 waits."""
        step, params, state = self._decoder()
        ids, expected = tokens(), self._recomputed()
        _, state = step(params, state, Step(ids[:, :3], jnp.zeros(2, jnp.int32)))
        logits, state = step(params, state, Step(ids[1:, 3:5], jnp.asarray([3]), slots=jnp.asarray([1])))
        self._check(logits, expected[1:, 3:5], start=3)
        both = jnp.stack([ids[1, 5:7], ids[0, 3:5]])
        logits, _ = step(params, state, Step(both, jnp.asarray([5, 3]), slots=jnp.asarray([1, 0])))
        self._check(logits, np.stack([expected[1, 5:7], expected[0, 3:5]]), start=[[5], [3]])

    def test_one_call_may_compute_several_steps(self) -> None:
        """One slot decodes while the other starts. Padding is at the end of a row, and in a row of its own."""
        ids, expected, longer = tokens(), self._recomputed(), jax.random.randint(jax.random.key(5), (1, 5), 0, 9)
        for first, second in ((0, 1), (1, 0)):
            step, params, state = self._decoder()
            begun = Step(ids[second : second + 1, :4], jnp.zeros(1, jnp.int32), slots=jnp.asarray([second]))
            _, state = step(params, state, begun)
            every = jnp.stack([longer[0, :1], longer[0, :1]]).at[second].set(ids[second, 4:5])
            counts = jnp.zeros(2, jnp.int32).at[second].set(1)
            decode = Step(every, state["lengths"], lengths=counts)
            prompt = jnp.concatenate([longer[:, :5], jnp.pad(ids[first : first + 1, :3], ((0, 0), (0, 2)))])
            prefill = Step(prompt, jnp.zeros(2, jnp.int32), lengths=jnp.asarray([0, 3]), slots=jnp.asarray([2, first]))
            (decoded, filled), state = step(params, state, (decode, prefill))
            self._check(decoded[second][None], expected[second, 4:5][None], f"slot {second} decodes", start=4)
            self._check(filled[1:, :3], expected[first, :3][None], f"slot {first} starts")
            assert np.isnan(np.asarray(filled[1, 3:])).all(), "logits of padding must be NaN"
            after = [
                Step(ids[second : second + 1, 5:6], jnp.asarray([5]), slots=jnp.asarray([second])),
                Step(
                    ids[first : first + 1, 3:6],
                    jnp.asarray([3]),
                    slots=jnp.asarray([first]),
                    logits_at=jnp.asarray([[2, 0]]),
                ),
            ]
            (decoded, filled), _ = step(params, state, after)
            self._check(decoded, expected[second, 5:6][None], f"slot {second} goes on", start=5)
            self._check(filled[:, :1], expected[first, 5:6][None], f"slot {first} goes on", start=5)
            self._check(filled[:, 1:], expected[first, 3:4][None], f"slot {first} goes on", start=3)

    def test_tokens_can_be_rolled_back(self) -> None:
        """A row continues from the position before rejected draft tokens."""
        if not self.rollback:
            pytest.skip("rollback is 0")
        step, params, state = self._decoder()
        ids, expected, start = tokens(), self._recomputed(), jnp.full((2,), LENGTH - self.rollback, jnp.int32)
        wrong = (ids + 1) % VOCAB_SIZE
        _, state = step(params, state, Step(ids[:, : LENGTH - self.rollback], jnp.zeros(2, jnp.int32)))
        _, state = step(params, state, Step(wrong[:, LENGTH - self.rollback :], start))
        logits, _ = step(params, state, Step(ids[:, LENGTH - self.rollback :], start))
        self._check(logits, expected[:, LENGTH - self.rollback :], start=LENGTH - self.rollback)

    def test_a_row_can_start_again(self) -> None:
        step, params, state = self._decoder()
        _, state = step(params, state, Step(tokens()[:, ::-1], jnp.zeros(2, jnp.int32)))
        logits, _ = step(params, state, Step(tokens(), jnp.zeros(2, jnp.int32)))
        self._check(logits, self._recomputed())

    def test_nan_of_an_earlier_row_is_not_seen(self) -> None:
        """Neither in all slots nor in one. The new row is shorter."""
        step, params, state = self._decoder()
        ids, expected, start = tokens(), self._recomputed(), jnp.zeros(2, jnp.int32)
        spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
        _, state = step(spoiled, state, Step(ids, start))
        logits, after = step(params, state, Step(ids[:, :3], start))
        self._check(logits, expected[:, :3], "all slots start")
        logits, _ = step(params, after, Step(ids[:, 3:4], start + 3))
        self._check(logits, expected[:, 3:4], "all slots go on", start=3)
        slot = jnp.asarray([1])
        logits, after = step(params, state, Step(ids[1:, :3], start[:1], slots=slot))
        self._check(logits, expected[1:, :3], "slot 1 starts")
        logits, _ = step(params, after, Step(ids[1:, 3:4], start[:1] + 3, slots=slot))
        self._check(logits, expected[1:, 3:4], "slot 1 goes on", start=3)

    def test_nan_of_a_token_reaches_only_tokens_that_see_it(self) -> None:
        """A token whose embedding is NaN, in a step with others before it and after it."""
        if self.keeps is not None:
            pytest.skip("the cache drops visible keys")
        step, params, state = self._decoder()
        unused = next(id for id in range(VOCAB_SIZE) if id not in np.asarray(tokens()))
        embedding = params["embedding"]
        params = params | {"embedding": embedding | {"weight": embedding["weight"].at[unused].set(jnp.nan)}}
        ids, start = tokens().at[:, 4].set(unused), jnp.zeros(2, jnp.int32)
        logits, state = step(params, state, Step(ids[:, :6], start))
        self._check(logits[:, :4], self._recomputed()[:, :4], "tokens before it")
        assert np.isnan(logits[:, 4:]).all(), "tokens that see a token of NaN must be NaN"
        again, _ = step(params, state, Step(tokens()[:, 4:], start + 4))
        if self.rollback >= 2:
            self._check(again, self._recomputed()[:, 4:], "after the token was replaced", start=4)

    def test_no_place_is_written_twice(self) -> None:
        """By one call of `DecodingState.put`, which promises that to XLA. The results of CPUs do not depend on it."""
        put = nn.DecodingState.put

        def checked(state: nn.DecodingState, at: tuple[jax.Array, ...], values: jax.Array) -> None:
            sizes = state.whole.shape[len(state.layer) :][: len(at)]
            places = np.stack([np.ravel(each) for each in np.broadcast_arrays(*at)], axis=-1)
            inside = places[((places >= 0) & (places < sizes)).all(axis=-1)]
            assert len(np.unique(inside, axis=0)) == len(inside), f"places are written twice: {inside.tolist()}"
            put(state, at, values)

        decoder, params, state = Decoder.of(self._model(), cache=self._cache(), batch_size=2, max_len=self.max_len)
        ids, start = tokens(self.max_len), jnp.zeros(2, jnp.int32)
        with pytest.MonkeyPatch.context() as patched, jax.disable_jit():  # so that the places are known
            patched.setattr(nn.DecodingState, "put", checked)
            _, state = decoder(params, state, Step(ids, start, jnp.asarray([self.max_len, 3])))
            decoder(params, state, Step(ids[:, 3:6], start, jnp.asarray([3, 0]), jnp.asarray([1, 2])))

    def test_rows_are_independent(self) -> None:
        step, params, state = self._decoder()
        ids, expected = tokens(), self._recomputed()
        for kept, changed in ((0, 1), (1, 0)):
            other = ids.at[changed].set((ids[changed] + 1) % VOCAB_SIZE)
            logits, _ = step(params, state, Step(other, jnp.zeros(2, jnp.int32)))
            self._check(logits[kept][None], expected[kept][None], f"row {kept}, with other tokens in row {changed}")

    def test_every_option_of_attention_is_applied(self) -> None:
        options = {"softcap": 1.5, "scale": 0.9, "sinks": Normal(stddev=1.0), "bias": Slopes.Config()}
        cfg = ax.select(self.model(), Attention).set(**options)
        self._check(self._decoded((3, 1, 3), cfg=cfg), self._recomputed(cfg=cfg))
        plain = self._recomputed()
        assert np.abs(self._recomputed(cfg=cfg) - plain).max() > 10 * self.exact, "the options do not change the logits"

    def test_latents_can_be_stored(self) -> None:
        if not has_field(offered_config(self), "value_dim"):
            pytest.skip("the config has no field value_dim, which storing latents requires")
        mask = next(node.mask for _, node in ax.config.walk(self.model()) if isinstance(node, Attention.Config))
        attention = LatentAttention.Config(
            num_heads=4, kv_lora_rank=6, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=3, mask=mask, absorb_up_to=2
        )
        cfg = ax.select(self.model(), Attention).map(lambda _, __: attention)
        self._check(self._decoded((3, 1, 3), cfg=cfg), self._recomputed(cfg=cfg))

    def test_decoding_does_not_change_parameter_paths(self) -> None:
        cfg = for_decoding(self.model(), batch_size=2, max_len=self.max_len, cache=self._cache())
        before, after = (set(by_path(abstract(each)[1])) for each in (self.model(), cfg))
        assert after == before, f"a KV cache must not have parameters: {sorted(after ^ before)}"

    def test_state_has_logical_axes(self) -> None:
        decoder, _, state = Decoder.of(self._model(), cache=self._cache(), batch_size=3, max_len=self.max_len)
        assert (decoder.paging is None) == (self.row_axis == "batch"), "PagedCacheSuite is for caches with pages"
        axes = logical_axes(decoder.state_axes["model"])
        assert any(self.row_axis in names for names in axes.values()), (
            f"give DecodingState its logical axes, such as {self.row_axis}; found: {axes}"
        )
        for path, array in by_path(state["model"]).items():
            named = [size for size, name in zip(array.shape, axes[path], strict=True) if name == "batch"]
            assert all(size == 3 for size in named), f"{path} {array.shape} with axes {axes[path]}"

    def test_a_scanned_stack_equals_recomputation(self) -> None:
        self._check(self._decoded((3, 4), unstack=False), self._recomputed())

    def test_bfloat16_is_close_to_float32(self) -> None:
        cfg = self.model().set(dtypes=ax.DTypes(compute=jnp.bfloat16))
        self._check(self._decoded((3, 4), cfg=cfg), self._recomputed(), exact=0.15)

    def test_greedy_generation_equals_recomputation(self) -> None:
        model, prompt = self._model(), tokens()[0, :4]
        greedy = functools.partial(
            generate,
            model,
            prompt,
            num_tokens=self.max_len - 4,
            context=self.max_len,
            key=jax.random.key(0),
            temperature=0,
        )
        found = greedy(cache=self._cache())
        count = len(found) if self.keeps is None else max(self.keeps - 3, 0)  # the first token follows 4 tokens
        assert found[:count].tolist() == greedy()[:count].tolist()

    def test_an_engine_gives_the_log_probabilities_of_training(self) -> None:
        """Prompts in chunks, and two rows of different lengths that decode together."""
        if self.keeps is not None:
            pytest.skip("the cache drops visible keys")
        size = self.max_len
        cfg = Engine.Config(cache=self._cache(), max_len=size, max_rows=2, step_tokens=size // 2)
        check_logprobs(self._model(), cfg, bound=2 * self.exact, lengths=(size // 2 + 1, 2), max_tokens=size // 3)

    def _check(
        self,
        found: ArrayLike,
        expected: np.ndarray,
        message: str = "",
        *,
        start: Sequence[Sequence[int]] | int = 0,
        exact: float | None = None,
    ) -> None:
        """Compares logits [rows, tokens, vocab] of consecutive tokens.

        Args:
            found, expected: the logits.
            message: describes the case.
            start: index of the first token in its row, broadcastable to [rows, 1].
            exact: replaces `self.exact`.
        """
        error = np.asarray(found) - expected
        index = np.broadcast_to(np.asarray(start) + np.arange(error.shape[1]), error.shape[:2])
        kept = np.full(index.shape, True) if self.keeps is None else index < self.keeps
        bound = self.exact if exact is None else max(self.exact, exact)
        largest, dropped = np.abs(error[kept]).max(initial=0.0), _rms(error[~kept])
        assert largest <= bound, (
            f"{message}: the largest error of the logits is {largest:.3g}, at most {bound} is allowed"
        )
        assert dropped <= self.lossy + (exact or 0.0), (
            f"{message}: the root mean square error of the logits after {self.keeps} tokens is {dropped:.3g}, at most "
            f"{self.lossy} is allowed"
        )

    def _cache(self) -> nn.KVCache.Config:
        cfg = offered_config(self)
        assert isinstance(cfg, nn.KVCache.Config)
        return cfg

    def _model(self, cfg: Config | None = None) -> Layer:
        model: Layer = (self.model() if cfg is None else cfg).build(rngs=Rngs(0))
        return model

    def _decoder(self, cfg: Config | None = None, unstack: bool = True) -> CompiledDecoder:
        made: CompiledDecoder | None = type(self).__dict__.get("_made")  # compiled once per class
        if made is None or cfg is not None or not unstack:
            decoder, params, state = Decoder.of(
                self._model(cfg), cache=self._cache(), batch_size=2, max_len=self.max_len, unstack=unstack
            )
            made = jax.jit(decoder.__call__), params, state
            if cfg is None and unstack:
                type(self)._made = made
        return made

    def _decoded(
        self, sizes: tuple[int, ...], length: int = LENGTH, cfg: Config | None = None, unstack: bool = True
    ) -> np.ndarray:
        step, params, state = self._decoder(cfg, unstack)
        logits, start, ids = [], 0, tokens(length)
        for size in sizes:
            each, state = step(params, state, Step(ids[:, start : start + size], jnp.full((2,), start, jnp.int32)))
            logits.append(each)
            start += size
        return np.concatenate(logits, axis=1)

    def _recomputed(self, length: int = LENGTH, cfg: Config | None = None, ids: jax.Array | None = None) -> np.ndarray:
        fn, params, state = functional(self._model(cfg))
        ids = tokens(length) if ids is None else ids
        return np.asarray(jax.jit(lambda ids: fn(params, state, ids)[0][0])(ids))


def _rms(error: np.ndarray) -> float:
    return float(np.sqrt(np.mean(error**2))) if error.size else 0.0


def tokens(length: int = LENGTH) -> jax.Array:
    """The first tokens of the two rows of all checks."""
    return jax.random.randint(jax.random.key(4), (2, 32), 0, VOCAB_SIZE)[:, :length]


def _compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All sequences of positive integers that add up to `total`."""
    for cuts in itertools.product((False, True), repeat=total - 1):
        sizes = [1]
        for cut in cuts:
            sizes = [*sizes, 1] if cut else [*sizes[:-1], sizes[-1] + 1]
        yield tuple(sizes)


def logical_axes(axes: Tree) -> dict[str, tuple[str | None, ...]]:
    """The logical axes of decoding state by path."""
    leaves = jax.tree.leaves_with_path(axes, is_leaf=lambda node: isinstance(node, tuple))
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
