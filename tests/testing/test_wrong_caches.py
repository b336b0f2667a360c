"""`KVCacheSuite` fails for caches that are wrong in one way, and passes for a correct and for a lossy one."""

import dataclasses

import jax.numpy as jnp
import pytest

from axcore.module import DecodingState
from axcore.nn import Contiguous, ContiguousCache, InCache, Ones, SlidingWindow
from axcore.testing import KVCacheSuite

from .wrong import instance, names


class Cache(ContiguousCache):
    """A contiguous cache whose steps subclasses replace."""

    def __call__(self, inputs):
        rows, new = self.rows(inputs), self.new(inputs.plain)
        at = self.where(inputs)
        self.keys.put(at, new.k)
        self.values.put(at, new.v)
        view = InCache(self.keys.whole, self.values.whole, self.seen(rows.tokens), self.keys.layer, rows.slots)
        return inputs.replace(kv=view)

    def new(self, kv):
        return kv

    def where(self, inputs):
        return self.places(inputs, self.config.max_len)

    def seen(self, tokens):
        return tokens


class Lossy(Cache):
    """Each query sees the last four tokens."""

    def __call__(self, inputs):
        return super().__call__(inputs.replace(mask=inputs.mask & SlidingWindow(size=4)))


class NoFirst(Cache):
    def seen(self, tokens):
        return dataclasses.replace(tokens, valid=tokens.valid & (tokens.index > 0))


class Halved(Cache):
    def new(self, kv):
        return Contiguous(kv.k, kv.v / 2, kv.tokens)


class Rounded(Cache):
    def new(self, kv):
        return Contiguous(*(x.astype(jnp.bfloat16) for x in (kv.k, kv.v)), kv.tokens)


class Appends(Cache):
    """Writes after the tokens of the step before, even if this step starts earlier."""

    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.count = DecodingState(jnp.zeros(cfg.batch_size, jnp.int32), axes=("batch",))

    def where(self, inputs):
        slots, _ = super().where(inputs)
        first = self.count[...][slots[:, 0]]
        self.count.put((slots[:, 0],), first + slots.shape[1])
        return slots, first[:, None] + jnp.arange(slots.shape[1])


class OneShort(Cache):
    """Does not store the token in the last place."""

    def where(self, inputs):
        slots, place = super().where(inputs)
        return slots, jnp.where(place == self.config.max_len - 1, self.config.max_len, place)


class NoSlots(Cache):
    def where(self, inputs):
        slots, place = super().where(inputs)
        return jnp.broadcast_to(jnp.arange(len(slots))[:, None], slots.shape), place


class FirstRow(Cache):
    """Stores the keys of the first row for every row."""

    def new(self, kv):
        return Contiguous(jnp.broadcast_to(kv.k[:1], kv.k.shape), kv.v, kv.tokens)


class LastOfStep(Cache):
    """Stores only the last token of a step."""

    def where(self, inputs):
        slots, place = super().where(inputs)
        return slots, jnp.where(jnp.arange(slots.shape[1]) < slots.shape[1] - 1, self.config.max_len, place)


class OnlyNew(Cache):
    """Attention sees only the tokens of the step."""

    def __call__(self, inputs):
        super().__call__(inputs)
        return inputs


class NoSoftcap(Cache):
    def __call__(self, inputs):
        return super().__call__(inputs.replace(softcap=None))


class Padding(Cache):
    """Padding is stored after the tokens of a row, and it counts as tokens."""

    def seen(self, tokens):
        return dataclasses.replace(tokens, valid=None, index=jnp.minimum(tokens.index, 2))


class PaddingLast(Cache):
    """Padding is stored in the last place of a row."""

    def where(self, inputs):
        slots, place = super().where(inputs)
        return slots, jnp.minimum(place, self.config.max_len - 1)


class Weights(Cache):
    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.weights = self.param("weights", (cfg.head_dim,), Ones(), rngs, axes=(None,))


class NoAxes(Cache):
    def __init__(self, cfg, *, rngs):
        super().__init__(cfg, rngs=rngs)
        self.keys = DecodingState(self.keys.whole, axes=(None,) * 4)
        self.values = DecodingState(self.values.whole, axes=(None,) * 4)


class NoLayer(Cache):
    """Reads the first layer of a scanned stack."""

    def __call__(self, inputs):
        view = super().__call__(inputs).kv
        return inputs.replace(kv=dataclasses.replace(view, layer=tuple(0 * each for each in view.layer)))


def suite(cache, **attributes):
    return instance(KVCacheSuite, name="contiguous", _cache=lambda self: cache.Config(), **attributes)


CHECKS = {
    "engine": ("test_an_engine_gives_the_log_probabilities_of_training",),
    "bounds": ("test_the_bounds_reject_a_cache_that_keeps_nothing",),
    "filled": ("test_rows_can_be_filled_up_to_max_len",),
    "places": ("test_no_place_is_written_twice",),
    "lengths": ("test_rows_may_have_different_lengths",),
    "one step": ("test_one_step_equals_recomputation",),
    "options": ("test_every_option_of_attention_is_applied",),
    "parameters": ("test_decoding_does_not_change_parameter_paths",),
    "rollback": ("test_tokens_can_be_rolled_back",),
    "rows": ("test_rows_are_independent",),
    "scan": ("test_a_scanned_stack_equals_recomputation",),
    "some rows": ("test_a_step_may_contain_some_of_the_rows",),
    "splits": ("test_every_split_into_steps_equals_recomputation", 5),
    "start again": ("test_a_row_can_start_again",),
    "state": ("test_state_has_logical_axes",),
    "generation": ("test_greedy_generation_equals_recomputation",),
}
LOSSY = {"keeps": 4, "lossy": 0.55, "rollback": 0}
EMPTY = {**LOSSY, "lossy": 10.0}
WRONG = {
    "appends, rollback": (suite(Appends), "rollback"),
    "appends, start again": (suite(Appends), "start again"),
    "exact of 10": (suite(Cache, exact=10.0), "bounds"),
    "first row": (suite(FirstRow), "rows"),
    "halved": (suite(Halved), "one step"),
    "last of step": (suite(LastOfStep), "splits"),
    "lossy": (suite(Lossy), "one step"),
    "lossy of 10": (suite(Lossy, **EMPTY), "bounds"),
    "lossy, only new": (suite(OnlyNew, **LOSSY), "splits"),
    "lossy, halved": (suite(Halved, **LOSSY), "one step"),
    "no axes": (suite(NoAxes), "state"),
    "no first": (suite(NoFirst), "splits"),
    "no layer": (suite(NoLayer), "scan"),
    "no slots": (suite(NoSlots), "some rows"),
    "no softcap": (suite(NoSoftcap), "options"),
    "one short": (suite(OneShort), "filled"),
    "only new": (suite(OnlyNew), "splits"),
    "only new, engine": (suite(OnlyNew), "engine"),
    "padding": (suite(Padding), "lengths"),
    "padding last": (suite(PaddingLast), "places"),
    "rounded": (suite(Rounded), "one step"),
    "weights": (suite(Weights), "parameters"),
}
LONG = ("exact of 10", "lossy of 10", "no axes", "padding last", "weights")


@pytest.mark.parametrize("name", names(WRONG, LONG))
def test_case_a_wrong_cache_fails(name):
    wrong, check = WRONG[name]
    method, *arguments = CHECKS[check]
    with pytest.raises(AssertionError):
        getattr(wrong, method)(*arguments)


@pytest.mark.slow
@pytest.mark.parametrize("check", CHECKS)
def test_case_a_correct_cache_passes(check):
    method, *arguments = CHECKS[check]
    getattr(suite(Cache), method)(*arguments)


@pytest.mark.slow
def test_case_a_declared_lossy_cache_passes():
    declared = suite(Lossy, **LOSSY)
    for method, *arguments in (CHECKS[name] for name in CHECKS):
        if method != "test_tokens_can_be_rolled_back":
            getattr(declared, method)(*arguments)
