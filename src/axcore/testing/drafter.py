"""The conformance suite of a drafter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar
from unittest import mock

import numpy as np

import axcore as ax
from axcore.config import Config
from axcore.infer import Engine, Request, SamplingOptions
from axcore.infer.sequences import Sequence
from axcore.infer.speculation import Drafter, Drafts
from axcore.module import Layer, Rngs
from axcore.nn import Normal
from axcore.plugin import DrafterOffer
from axcore.testing.models import tiny_model
from axcore.testing.offer import OfferSuite, offered_config

MAX_LEN, LENGTHS, OUTPUT = 48, (3, 11, 1, 7, 5), 14


class DrafterSuite(OfferSuite):
    """Checks that a drafter keeps its contract, changes no output, and has drafts that are accepted.

    ```python
    class TestMemory(DrafterSuite):
        name = "memory"
        options = {"context": 3}
    ```

    Attributes:
        min_accepted: the smallest number of accepted drafts when a request of 14 tokens is repeated.
    """

    kind = DrafterOffer
    min_accepted: ClassVar[int] = 1

    def model(self) -> Config:
        """The model whose tokens are predicted. Its outputs depend on every token."""
        return ax.select(tiny_model(), "embedding").set(init=Normal(stddev=1.0))

    def draft_model(self) -> Layer | None:
        """The argument `draft_model` of the engine."""
        return None

    def config(self) -> Engine.Config:
        drafter = offered_config(self)
        assert isinstance(drafter, Drafter.Config)
        return Engine.Config(max_len=MAX_LEN, max_rows=2, step_tokens=16, speculation=drafter)

    def test_outputs_are_those_without_drafts(self) -> None:
        """More requests than rows, so that rows change their sequences, with several sampling options."""
        requests = _requests()
        with self._engine(self.config().set(speculation=None)) as engine:
            expected = [piece.ids for piece in engine.generate(requests)]
        with self._engine() as engine:
            found = [piece.ids for piece in engine.generate(requests)]
        assert found == expected

    def test_drafts_are_token_ids_of_the_given_sequences(self) -> None:
        with self._engine() as engine, self._watched(engine.vocab_size) as numbers:
            engine.generate(_requests())
        assert sum(numbers), "no drafts were proposed"

    def test_drafts_are_accepted_when_a_request_is_repeated(self) -> None:
        with self._engine() as engine:
            request = _requests()[0]
            engine.generate([request])
            before = engine.stats.accepted_tokens
            engine.generate([request])
            accepted = engine.stats.accepted_tokens - before
        assert accepted >= self.min_accepted, (
            f"{accepted} drafts were accepted, expected at least min_accepted={self.min_accepted}"
        )

    def test_nothing_compiles_after_warm_up(self) -> None:
        with self._engine() as engine:
            engine.warm_up()
            compiled = engine.stats.compiled
            engine.generate(_requests())
            late = engine.stats.compiled - compiled
        assert not late, f"{late} programs were compiled after warm_up; compile them in Drafter.warm_up"

    def _engine(self, cfg: Engine.Config | None = None) -> Engine:
        cfg = self.config() if cfg is None else cfg
        draft_model = None if cfg.speculation is None else self.draft_model()
        built: Engine = cfg.build(self.model().build(rngs=Rngs(0)), draft_model=draft_model)
        return built

    @contextlib.contextmanager
    def _watched(self, vocab_size: int) -> Iterator[list[int]]:
        """Checks every proposal. Returns the number of drafts of each sequence in each step."""
        cfg = self.config().speculation
        assert cfg is not None
        kind: Any = type(cfg).target
        original, numbers, wrong = kind.propose, [], []

        def propose(drafter: Drafter, sequences: Iterable[Sequence], seeds: Mapping[int, Any]) -> Drafts:
            given = list(sequences)
            before = {each.id: list(each.tokens) for each in given}
            drafts: Drafts = original(drafter, given, seeds)
            for each in given:
                if each.tokens != before[each.id]:
                    wrong.append("propose changed the tokens of a sequence")
                    each.tokens[:] = before[each.id]  # so that the engine ends
            for id, tokens in drafts.items():
                numbers.append(len(tokens))
                if id not in before:
                    wrong.append(f"drafts for {id}, which is not the id of a given sequence")
                if not isinstance(tokens, tuple) or any(type(token) is not int for token in tokens):
                    wrong.append(f"drafts {tokens!r} are not a tuple of int")
                elif not all(0 <= token < vocab_size for token in tokens):
                    wrong.append(f"drafts {tokens!r} are not token ids from 0 to {vocab_size - 1}")
                if len(tokens) > cfg.num_speculative_tokens:
                    wrong.append(f"{len(tokens)} drafts, at most num_speculative_tokens={cfg.num_speculative_tokens}")
            return {} if wrong else drafts

        with mock.patch.object(kind, "propose", propose):
            yield numbers
        assert not wrong, "; ".join(dict.fromkeys(wrong))


def _requests() -> list[Request]:
    random = np.random.default_rng(0)
    options = (
        SamplingOptions(temperature=0.0, max_tokens=OUTPUT),
        SamplingOptions(seed=1, max_tokens=OUTPUT),
        SamplingOptions(seed=2, max_tokens=3, top_k=5, repetition_penalty=1.2),
        SamplingOptions(temperature=0.0, max_tokens=1),
        SamplingOptions(seed=3, max_tokens=OUTPUT, logit_bias={3: 2.0}),
    )
    prompts = [tuple(random.integers(0, tiny_model().vocab_size, length).tolist()) for length in LENGTHS]
    return [Request(ids, each) for ids, each in zip(prompts, options, strict=True)]
