"""The sampling options of the rows of one step, packed into few arrays."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Literal

import jax
import numpy as np
from jaxtyping import Array, Float32, Int32

from axcore.config import ConfigError
from axcore.infer.requests import SamplingOptions
from axcore.infer.sampling.seeds import Seed

Method = Literal["greedy", "plain", "full"]
"""How much a program computes: the most likely tokens; also samples at a temperature; or every option."""

GREEDY_BELOW = 1e-5
"""Temperatures below this select the most likely token."""

NO_SLOT = np.iinfo(np.int32).max
"""The slot of padding rows, which is out of range."""

USUAL_LOGPROBS = 20
"""The number of most likely tokens whose log-probabilities programs return, if a request asks for any. Larger numbers
are rounded up to powers of two."""

SMALLEST_EDITS = 16
"""The smallest number of edited logits per row in a program. Larger ones are multiplied by four."""

MAX_VOCAB_SIZE = 2**19 - 1
"""The largest vocabulary for which sums over tokens are exact."""


@dataclasses.dataclass(frozen=True)
class NextToken:
    """What the host knows about the token to sample in one row.

    Attributes:
        options: the options of the request.
        seed: the words of the row's seed; see `seed_words`.
        position: the position of the token in its row. With the seed, it determines the random numbers.
        num_output: the number of output tokens before it.
        slot: the slot of the row in `Counts`.
        grammar: bit i % 32 of word i // 32 allows token i; None: all tokens are allowed.
    """

    options: SamplingOptions
    seed: Seed
    position: int
    num_output: int
    slot: int
    grammar: Int32[np.ndarray, " words"] | None = None

    @property
    def method(self) -> Method:
        """The cheapest method that covers the options."""
        options = self.options
        neutral = (
            self.grammar is None
            and self.num_output >= options.min_tokens
            and not options.logit_bias
            and not options.frequency_penalty
            and not options.presence_penalty
            and options.repetition_penalty == 1
        )
        if neutral and options.temperature < GREEDY_BELOW:
            return "greedy"
        return "plain" if neutral and options.top_k is None and options.top_p == 1 and not options.min_p else "full"


PADDING = NextToken(SamplingOptions(temperature=0.0), (0, 0), position=0, num_output=0, slot=NO_SLOT)
"""What a padding row samples. Its result has no effect."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SamplingRows:
    """The options of each row, as arrays.

    Attributes:
        ints: for each row the two words of the seed, the position of the token, its slot and top_k.
        floats: for each row temperature, top_p, log(min_p), and the frequency, presence and repetition penalty.
        edit_ids: token ids whose logits are edited. The size of the vocabulary stands for none.
        edits: added to these logits; -inf excludes a token.
        grammar: bit masks of allowed tokens; see `NextToken`.
        method: the options that have an effect. The arrays that a method ignores are None.
        vocab_size: the number of real tokens. Later columns of the logits are padding, and never sampled.
        num_logprobs: the number of most likely tokens whose log-probabilities are returned beside that of the sampled
            token; None: no log-probabilities.
        processed: whether log-probabilities are those after all options, instead of those of softmax(logits).
    """

    ints: Int32[Array | np.ndarray, "rows 5"] | None
    floats: Float32[Array | np.ndarray, "rows 6"] | None
    edit_ids: Int32[Array | np.ndarray, "rows edits"] | None
    edits: Float32[Array | np.ndarray, "rows edits"] | None
    grammar: Int32[Array | np.ndarray, "rows words"] | None
    method: Method = dataclasses.field(metadata={"static": True})
    vocab_size: int = dataclasses.field(metadata={"static": True})
    num_logprobs: int | None = dataclasses.field(metadata={"static": True})
    processed: bool = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(
        cls,
        tokens: Sequence[NextToken],
        *,
        vocab_size: int,
        eos_ids: Collection[int] = (),
        method: Method | None = None,
        logprobs: Literal["raw", "processed"] = "raw",
    ) -> SamplingRows:
        """Packs the options of some rows into new NumPy arrays.

        Args:
            tokens: the token to sample in each row, or `PADDING`. Ids must be in the vocabulary: see
                `SamplingOptions.check`.
            vocab_size: the number of real tokens.
            eos_ids: the tokens that end a text, which `min_tokens` excludes.
            method: at least the method of every row; None: the cheapest that covers all rows.
            logprobs: `raw` returns log(softmax(logits)); `processed` the log-probabilities after penalties, bias,
                masks, temperature and truncation. At temperature 0, these are those after penalties, bias and masks.

        Raises:
            ConfigError: a grammar mask has the wrong size, a row needs a method that computes more, or the vocabulary
                has 2**19 tokens or more.
        """
        if not 0 < vocab_size <= MAX_VOCAB_SIZE:
            raise ConfigError(f"vocab_size={vocab_size} must be from 1 to {MAX_VOCAB_SIZE}, for sums to be exact")
        order: tuple[Method, ...] = ("greedy", "plain", "full")
        needed = max([order[0], *(token.method for token in tokens)], key=order.index)
        if method is None:
            method = needed
        elif order.index(method) < order.index(needed):
            raise ConfigError(f"method={method!r} ignores options of a row that needs {needed!r}. Use {needed!r}")
        asked = [token.options.logprobs for token in tokens if token.options.logprobs is not None]
        num_logprobs = min(_logprob_size(max(asked)), vocab_size) if asked else None
        ints = floats = edit_ids = edits = grammar = None
        if method != "greedy":
            ints, floats = _ints(tokens, vocab_size), _floats(tokens)
        if method == "full":
            edit_ids, edits = _edits(tokens, vocab_size, eos_ids)
            if any(token.grammar is not None for token in tokens):
                grammar = _grammar(tokens, vocab_size)
        return cls(ints, floats, edit_ids, edits, grammar, method, vocab_size, num_logprobs, logprobs == "processed")


def _logprob_size(count: int) -> int:
    return USUAL_LOGPROBS if count <= USUAL_LOGPROBS else 1 << (count - 1).bit_length()


def _ints(tokens: Sequence[NextToken], vocab_size: int) -> Int32[np.ndarray, "rows 5"]:
    rows = [
        (*token.seed, token.position, token.slot, min(token.options.top_k or vocab_size, vocab_size))
        for token in tokens
    ]
    return np.array(rows, np.uint32).view(np.int32)


def _floats(tokens: Sequence[NextToken]) -> Float32[np.ndarray, "rows 6"]:
    rows = []
    for token in tokens:
        options = token.options
        greedy = options.temperature < GREEDY_BELOW
        rows.append(
            (
                *((0.0, 1.0, 0.0) if greedy else (options.temperature, options.top_p, options.min_p)),
                options.frequency_penalty,
                options.presence_penalty,
                options.repetition_penalty,
            )
        )
    floats = np.clip(np.array(rows), *_FINITE)
    with np.errstate(divide="ignore"):
        floats[:, 2] = np.log(floats[:, 2])
    floats[:, 5] = np.maximum(floats[:, 5], np.finfo(np.float32).tiny)
    return floats.astype(np.float32)


_FINITE = float(np.finfo(np.float32).min), float(np.finfo(np.float32).max)


def _edits(
    tokens: Sequence[NextToken], vocab_size: int, eos_ids: Collection[int]
) -> tuple[Int32[np.ndarray, "rows edits"], Float32[np.ndarray, "rows edits"]]:
    rows: list[list[tuple[int, float]]] = []
    for token in tokens:
        options = token.options
        excluded = {*eos_ids, *options.stop_token_ids} if token.num_output < options.min_tokens else set()
        bias = [(id, value) for id, value in options.logit_bias.items() if id not in excluded]
        rows.append([*bias, *((id, -np.inf) for id in sorted(excluded))])
    width, longest = SMALLEST_EDITS, max(map(len, rows), default=0)
    while width < longest:
        width *= 4
    ids, values = np.full((len(rows), width), vocab_size, np.int32), np.zeros((len(rows), width), np.float32)
    for row, edits in enumerate(rows):
        if edits:
            ids[row, : len(edits)], given = zip(*edits, strict=True)
            values[row, : len(edits)] = np.where(np.isinf(given), given, np.clip(given, *_FINITE))
    return ids, values


def _grammar(tokens: Sequence[NextToken], vocab_size: int) -> Int32[np.ndarray, "rows words"]:
    words = -(-vocab_size // 32)
    masks = np.full((len(tokens), words), -1, np.int32)
    for row, token in enumerate(tokens):
        if token.grammar is None:
            continue
        if token.grammar.shape != (words,) or token.grammar.dtype != np.int32:
            raise ConfigError(
                f"grammar of row {row} must be int32 [{words}], one bit for each of {vocab_size} tokens, got "
                f"{token.grammar.dtype} {list(token.grammar.shape)}"
            )
        masks[row] = token.grammar
    return masks
