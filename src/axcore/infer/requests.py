"""What callers ask of an engine, and what they get back."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float

from axcore.config import ConfigError, FiniteFloat, NonNegativeFloat, NonNegativeInt, PositiveInt, Range
from axcore.config.frozen import frozen
from axcore.config.types import conforms, hints, required, widened
from axcore.infer.grammar import Grammar

type FinishReason = Literal["stop", "length", "cancelled"]
"""Why a sample ended: an EOS token, stop token or stop string; the maximum length; or a call of `cancel`."""

Pooling = Literal["last", "mean"]
"""The hidden states of a prompt that are its embedding: those of its last token, or their mean."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How the tokens of one request are chosen.

    Attributes:
        temperature: divides the logits; 0 selects the most likely token.
        top_k: the number of most likely tokens to choose from; None: all.
        top_p: chooses from the most likely tokens whose probabilities sum to at least `top_p`.
        min_p: chooses from tokens that are at least `min_p` times as likely as the most likely one.
        frequency_penalty: subtracted from the logit of a token for each time that it occurs in the output.
        presence_penalty: subtracted from the logit of a token that occurs in the output.
        repetition_penalty: divides positive logits, and multiplies negative ones, of tokens in the prompt or output.
        logit_bias: added to the logits, by token id.
        seed: makes the sample reproducible, whichever requests run beside it; None: chosen at random.
        max_tokens: the maximum number of output tokens; None: up to the length of the context.
        min_tokens: EOS and stop tokens are not sampled before this many output tokens. Stop strings end earlier, too.
        stop: strings that end the sample. The output excludes them.
        stop_token_ids: tokens that end the sample, besides the EOS tokens of the model.
        ignore_eos: whether the EOS tokens of the model do not end the sample.
        logprobs: the number of most likely tokens whose log-probabilities are returned besides that of the sampled
            token; None: no log-probabilities.
        grammar: what the text of the output must match; None: anything. EOS tokens are sampled only where the text is
            complete, and the sample ends where no text may follow, even before `min_tokens`. `max_tokens`, stop strings
            and stop tokens with text may end it before it is complete.
        prompt_logprobs: whether the first piece has the log-probabilities of the prompt, with the number of most likely
            tokens in `logprobs`.

    Raises:
        ConfigError: a value is outside of its range, or not finite.
    """

    temperature: NonNegativeFloat = 1.0
    top_k: PositiveInt | None = None
    top_p: Annotated[float, Range(above=0, at_most=1)] = 1.0
    min_p: Annotated[float, Range(at_least=0, at_most=1)] = 0.0
    frequency_penalty: FiniteFloat = 0.0
    presence_penalty: FiniteFloat = 0.0
    repetition_penalty: Annotated[float, Range(above=0)] = 1.0
    logit_bias: Mapping[int, FiniteFloat] = dataclasses.field(default_factory=dict)
    seed: int | None = None
    max_tokens: PositiveInt | None = None
    min_tokens: NonNegativeInt = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[NonNegativeInt, ...] = ()
    ignore_eos: bool = False
    logprobs: NonNegativeInt | None = None
    prompt_logprobs: bool = False
    grammar: Grammar | None = None

    def __post_init__(self) -> None:
        check_fields(self, "sampling", _REMEDIES)
        for token in self.logit_bias:
            if not conforms(token, NonNegativeInt):
                raise ConfigError(
                    f"sampling.logit_bias={dict(self.logit_bias)!r}: {token!r} is not a token id, an "
                    f"int of at least 0. Convert the keys of JSON objects with int()"
                )
        if "" in self.stop:
            raise ConfigError(
                f"sampling.stop={self.stop!r}: a stop string must have at least one character. Remove the empty string"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"sampling.min_tokens={self.min_tokens} must be at most sampling.max_tokens={self.max_tokens}. "
                f"Reduce min_tokens or raise max_tokens"
            )

    def all_stop_token_ids(self, eos_ids: Iterable[int]) -> frozenset[int]:
        """The tokens that end a sample: `stop_token_ids` and, unless `ignore_eos`, those of the model."""
        return frozenset(self.stop_token_ids).union(() if self.ignore_eos else eos_ids)

    def check(self, vocab_size: int) -> None:
        """Checks the token ids against the vocabulary.

        Raises:
            ConfigError: a token id is not in [0, vocab_size), or `logprobs` exceeds the vocabulary.
        """
        for name, ids in (("logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            _check_ids(f"sampling.{name}", ids, vocab_size)
        if self.logprobs is not None and self.logprobs > vocab_size:
            raise ConfigError(
                f"sampling.logprobs={self.logprobs} must be at most {vocab_size}, the size of the vocabulary. "
                f"Reduce logprobs"
            )


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt to continue.

    Attributes:
        ids: the tokens of the prompt.
        options: how the output is sampled.
        priority: requests with a smaller number run first; equal ones in the order of arrival.
        salt: requests with different salts share no cached prefix, so that one tenant cannot probe another's prompts.
        adapter: the name of a loaded adapter (see `Engine.load_adapter`); None: the model alone.
        pooling: asks for the embedding of the prompt in place of output; None: for output.

    Raises:
        ConfigError: `ids` is empty or has other values than token ids, another field has the wrong type, or `options`
            ask for output besides an embedding.
    """

    ids: tuple[int, ...]
    options: SamplingOptions = dataclasses.field(default_factory=SamplingOptions)
    priority: int = 0
    salt: str = ""
    adapter: str | None = None
    pooling: Pooling | None = None

    def __post_init__(self) -> None:
        check_fields(self, "request", _REMEDIES)
        object.__setattr__(self, "ids", tuple(self.ids))
        if not self.ids:
            raise ConfigError("request.ids=() must have at least one token. Start the prompt with the BOS token")
        for token in self.ids:
            if type(token) is not int or token < 0:
                raise ConfigError(
                    f"request.ids: {token!r} is not a token id, an int of at least 0. Use the ids of the tokenizer, "
                    f"and ids.tolist() of an array"
                )
        if self.pooling is not None and self.options != SamplingOptions(max_tokens=1):
            raise ConfigError(
                f"request.options: a request with pooling={self.pooling!r} has no output, so its options must be "
                f"SamplingOptions(max_tokens=1), not {_shown(self.options)}"
            )

    def check(self, vocab_size: int) -> None:
        """Checks the token ids against the vocabulary.

        Raises:
            ConfigError: a token id of the prompt or of the options is not in [0, vocab_size).
        """
        _check_ids("request.ids", self.ids, vocab_size)
        self.options.check(vocab_size)


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a token, given those before it.

    Attributes:
        id: the token.
        logprob: its natural log-probability.
        rank: the number of tokens that were more likely.
        top: the most likely tokens and their log-probabilities, the most likely first.
    """

    id: int
    logprob: float
    rank: int = 0
    top: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """New tokens of one sample.

    Attributes:
        ids: the tokens, at least one unless the sample was cancelled.
        text: their text; empty without a tokenizer.
        logprobs: one for each token; None if the request asks for none.
        finish_reason: why the sample ends with these tokens; None: more will follow.
        prompt_logprobs: in the first piece, one for each token of the prompt but the first; None if the request does
            not ask for them.
        embedding: float32 [embed], in the only piece of a request with `pooling`, which has no tokens; otherwise None.
        num_cached: in the first piece, the number of tokens of the prompt that were found in the cache; otherwise 0.
            Pieces that differ in it only are equal.
    """

    ids: tuple[int, ...]
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    embedding: Float[np.ndarray, " embed"] | None = dataclasses.field(default=None, compare=False)
    num_cached: int = dataclasses.field(default=0, compare=False)


_REMEDIES = {
    "temperature": "Use 0 to select the most likely token",
    "top_k": "Use None to choose from all tokens",
    "top_p": "Use 1 to choose from all tokens",
    "min_p": "Use 0 to choose from all tokens",
    "frequency_penalty": "Use 0 for no penalty",
    "presence_penalty": "Use 0 for no penalty",
    "repetition_penalty": "Use 1 for no penalty",
    "logit_bias": "Map token ids to finite numbers; a bias of -100 practically excludes a token",
    "seed": "Use None for a random seed",
    "max_tokens": "Use None for samples up to the length of the context, and Engine.score to sample nothing",
    "min_tokens": "Use 0 for no minimum",
    "stop": "Write one string as ('text',)",
    "stop_token_ids": "Use the ids of the tokenizer, as in (2,)",
    "ignore_eos": "Use True or False",
    "prompt_logprobs": "Use True or False",
    "grammar": "Use Grammar.regex(...), Grammar.json_schema(...), Grammar.choice(...), or None for free text",
    "logprobs": "Use None for no log-probabilities, and 0 for those of the sampled tokens only",
    "options": "Use SamplingOptions()",
    "priority": "Use 0 for the default",
    "salt": "Use '' to share prefixes with every request",
    "adapter": "Use None for the model without an adapter",
    "pooling": "Use 'last' or 'mean' for an embedding, and None for output",
}


def check_fields(owner: object, path: str, remedies: Mapping[str, str]) -> None:
    """Checks the fields of a frozen dataclass except `ids` against their annotations, and makes them immutable.

    Args:
        owner: the dataclass.
        path: what messages call it.
        remedies: what to do about a wrong value of each field.

    Raises:
        ConfigError: a value does not conform to its annotation.
    """
    for name, hint in hints(type(owner)).items():
        if name == "ids":  # a prompt has too many items for the general check
            continue
        value = frozen(getattr(owner, name))
        if not conforms(value, hint):
            raise ConfigError(f"{path}.{name} must be {required(value, hint)}, not {_shown(value)}. {remedies[name]}")
        object.__setattr__(owner, name, widened(value, hint))


def _check_ids(path: str, ids: Mapping[int, float] | tuple[int, ...], vocab_size: int) -> None:
    """Checks token ids, since embeddings and scatters clamp or drop wrong ones silently."""
    if ids and not max(ids) < vocab_size:
        raise ConfigError(
            f"{path}: token id {max(ids)} is not below {vocab_size}, the size of the vocabulary. Use the tokenizer of "
            f"the model"
        )


def _shown(value: object) -> str:
    """The value for a message, shortened, because prompts are long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
