"""An engine that answers many requests with one model by continuous batching."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Literal, Self

from axcore import config
from axcore.config import REQUIRED, AxcoreError, ConfigError, NonNegativeInt, PositiveInt
from axcore.infer.adapters import Adapters
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.disaggregation.handover import DeliverHandover, Export, Handover, Prefill
from axcore.infer.disaggregation.model_identity import ModelIdentity
from axcore.infer.disaggregation.pending_handover import PendingHandover
from axcore.infer.embeddings import PooledStates
from axcore.infer.engine.base import BaseEngine
from axcore.infer.engine.core import EngineCore
from axcore.infer.engine.loop import EngineLoop
from axcore.infer.engine.samples import Sample
from axcore.infer.execution.buckets import Buckets
from axcore.infer.execution.row_state import RowState
from axcore.infer.execution.warm_up import WarmUp
from axcore.infer.grammar import GrammarCompiler
from axcore.infer.guide import Grammars
from axcore.infer.requests import Piece, Request
from axcore.infer.sampling import Method, seed_words
from axcore.infer.scheduling.limits import SchedulerLimits
from axcore.infer.sequences import Sequence
from axcore.infer.speculation import Drafter
from axcore.infer.stats import EngineStats
from axcore.infer.streams import Deliver
from axcore.infer.text import TextStream
from axcore.module import Layer
from axcore.nn import ContiguousCache, KVCache
from axcore.parallel import Layout

if TYPE_CHECKING:
    from axcore.train.data.tokenizers import Tokenizer


class Engine(config.Configurable, BaseEngine):
    """Answers many requests with one model. Each step continues the rows of several requests.

    ```python
    with Engine.Config(max_len=1024).build(model) as engine:
        for piece in engine.stream(Request(ids=(1, 2, 3))):
            print(piece.ids)
    ```

    A thread of its own owns the device. While the device runs a step, the thread plans and dispatches the next: the
    token that a row sampled last stays on the device, and results are read one step late. Sizes are padded to buckets,
    so nothing compiles after `warm_up`.

    Args:
        model: a model with the call signature of `axcore.nn.CausalLM`.
        tokenizer: converts text to tokens and back; None: requests and pieces have no text.
        eos_ids: the tokens that end a sample.
        layout: the mesh and rules; None: a single device.
        draft_model: a smaller model with the same token ids, for `speculation=DraftModel.Config()`.
        prefill: computes the prompts, and hands their decoding state over to this engine (disaggregated prefill); None:
            this engine does. Embeddings, and preempted samples without saved state, are computed here.
    """

    class Config(config.Config):
        cache: KVCache.Config = ContiguousCache.Config()
        """Fills every empty cache slot of the model."""
        max_rows: PositiveInt = 8
        """The largest number of rows that decode together."""
        max_len: PositiveInt = REQUIRED
        """The largest number of tokens of a row, its prompt included."""
        step_tokens: PositiveInt = 512
        """The largest number of prompt tokens of a step. A longer prompt takes several steps."""
        burst_tokens: PositiveInt | None = None
        """The largest number of prompt tokens of a step during a burst of prompts; more than `step_tokens`. A burst
        begins when more than `2 * burst_tokens` prompt tokens could be computed, and ends when at most `step_tokens`
        are left. The last prompt of a burst then waits less for its first token. Rows that decode wait for the end of
        the burst, but for at most four of its steps in a row. Requires a cache with pages in every layer. None:
        `step_tokens` always applies."""
        page_tables: PositiveInt = 1
        """The number of sizes of page tables for which programs are compiled, each a quarter of the next. More sizes
        decode short rows faster with a kernel that reads the whole table, such as the reference kernel."""
        adapters: Adapters.Config | None = None
        """Room for adapters, which requests choose by name, such as that of axcore-lora; None: no adapters."""
        prefix_caching: bool | None = None
        """Whether prompts share the pages of equal prefixes; None: if all decoding state is in pages, or
        `prefix_states` is set."""
        prefix_states: NonNegativeInt = 0
        """For models whose decoding state is partly in pages, such as hybrids of attention and Mamba-2: the number of
        states that the device keeps besides those of `max_rows` rows, so that prompts share prefixes. A state is that
        of one row in all layers without pages, after a full page of its tokens. 0: prompts share none."""
        preemption: Literal["recompute", "offload"] = "recompute"
        """What happens to the decoding state of a sample that loses its row to another: it is computed again, or copied
        to host memory and back. Without room in `host_cache_bytes`, it is computed again."""
        host_cache_bytes: NonNegativeInt = 0
        """Host memory for the decoding state of preempted samples, and for prefixes that leave the page pool."""
        speculation: Drafter.Config | None = None
        """What proposes drafts, which the model verifies several at a time; None: a token of each row in each step."""
        grammars: GrammarCompiler.Config | None = None
        """Compiles the grammars of requests; None: requests with a grammar are refused."""

        def buckets(self, decoder: Decoder) -> Buckets:
            """The sizes of the calls of the model."""
            return Buckets.of(
                self.max_rows,
                self.step_tokens,
                self.max_len,
                None if decoder.paging is None else decoder.paging.pages_for(self.max_len),
                self.page_tables,
                has_parts=decoder.shares_prefixes,
                burst_tokens=self.burst_tokens,
            )

        def limits(self, decoder: Decoder) -> SchedulerLimits:
            """The sizes of the scheduler."""
            return SchedulerLimits(
                self.max_rows,
                self.max_len,
                self.step_tokens,
                self.burst_tokens,
                chunk_multiple=self.buckets(decoder).part or 1,
                recompute_above=decoder.recompute_above,
            )

        @property
        def num_drafts(self) -> int:
            """The largest number of drafts of a row. A row of max_len tokens has a last token and drafts, and samples
            a token after them."""
            return 0 if self.speculation is None else min(self.speculation.num_speculative_tokens, self.max_len - 2)

    config: Config

    def __init__(
        self,
        cfg: Config,
        model: Layer,
        tokenizer: Tokenizer | None = None,
        *,
        eos_ids: Iterable[int] = (),
        layout: Layout | None = None,
        prefill: Prefill | None = None,
        draft_model: Layer | None = None,
    ):
        self.config, self.tokenizer, self.eos_ids = cfg, tokenizer, tuple(eos_ids)
        self._core = EngineCore(cfg, model, eos_ids=self.eos_ids, layout=layout, draft_model=draft_model)
        self._model, self._identity, self._prefill = model.config, ModelIdentity(model), prefill
        self._grammars = None
        if cfg.grammars is not None:
            if tokenizer is None:
                raise ConfigError("engine.grammars requires a tokenizer. Give the engine one, or set grammars to None")
            self._grammars = Grammars(cfg.grammars, tokenizer, self.vocab_size, self.eos_ids)
        self._numbers = itertools.count()
        self._pending: set[PendingHandover] = set()  # samples whose prompt `prefill` computes
        self._loop = EngineLoop(self._core)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self._core.programs.vocab_size

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a row, its prompt included, that the config and the page pool allow."""
        return self._core.scheduler.max_len

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed or has failed, so that it takes no more requests."""
        return self._loop.is_closed

    @property
    def stats(self) -> EngineStats:
        """The counters now."""
        stats = self._core.stats(self._loop.counters)
        stats.waiting += len(self._pending)
        return stats

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, which requests may have as `adapter`."""
        return self._core.loaded.names

    def load_adapter(self, name: str, source: Any) -> None:  # Any: what the adapters of the engine load from
        """Loads an adapter for requests with this name. Compiles nothing after `warm_up`.

        If the name is loaded, requests from now on use the new adapter, and share no cached prefix with earlier ones.
        Running requests keep the old adapter, which therefore keeps its slot until they end.

        Args:
            name: the name in requests.
            source: a folder or an adapter in memory; see the implementation of `Engine.Config.adapters`.

        Raises:
            AxcoreError: the engine has no adapters or no free slot, or the adapter cannot be read or does not fit the
                model.
        """
        core = self._core
        if core.adapters is None:
            raise ConfigError(
                f"adapter {name!r}: the engine has no room for adapters. Set engine.adapters, for example to that of "
                f"axcore-lora"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter must be a text, not {name!r}. Use the name that requests give")
        try:
            arrays = core.adapters.arrays(source, self._model, core.programs.state_shapes)
        except AxcoreError as error:
            error.add_note(f"while loading the adapter {name!r}")
            raise
        identity = core.adapters.identity(arrays)

        def load() -> None:
            slot = core.loaded.free_slot(name, core.scheduler.adapters)
            core.programs.write_adapter(arrays, slot)
            core.loaded.add(name, slot, identity)

        self._loop.in_thread(load)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Later requests with its name are refused. Running requests keep it until they end.

        Raises:
            AxcoreError: it is not loaded.
        """
        self._loop.in_thread(functools.partial(self._core.loaded.remove, name))

    def check(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise ConfigError(
                f"{request!r} is not a Request. Use engine.request(text, SamplingOptions(...)), or Request(ids=...)"
            )
        request.check(self.vocab_size)
        if request.pooling is not None:
            self._check_embeddings()
        if request.adapter is not None:
            self._core.loaded.find(request.adapter)
        options = request.options
        if options.stop and self.tokenizer is None:
            raise ConfigError(
                f"sampling.stop={options.stop!r} requires a tokenizer. Give the engine one, or use stop_token_ids"
            )
        self._core.scheduler.check(request)
        if options.grammar is not None:
            if self._grammars is None:
                raise ConfigError(
                    "sampling.grammar requires a grammar compiler. Install a plugin that offers one (`axcore plugins` "
                    "lists them), and set engine.grammars to its Config (`axcore serve --grammars NAME`)"
                )
            self._grammars.check(options.grammar)

    def _check_embeddings(self) -> None:
        if self._core.drafter is not None and self._core.drafter.config.reads_hidden_states:
            raise ConfigError("request.pooling: the hidden states go to engine.speculation. Use another drafter")
        if not self._core.programs.decoder.has_hidden_states:
            raise ConfigError("request.pooling: the model has no layer `norm` before its head, so it has no embeddings")

    def submit(self, request: Request, deliver: Deliver, *, sample: int = 0) -> Callable[[], None]:
        self.check(request)
        if self._prefill is None or request.pooling is not None:
            return self._queue(request, deliver, sample=sample)
        pending = PendingHandover(deliver, functools.partial(self.resume, request, sample=sample), self._pending)
        pending.start(functools.partial(self._prefill.export, request, sample=sample))
        return pending.cancel

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int = 0) -> Callable[[], None]:
        """Computes the prompt of a request and its first token, for another engine that continues it with `resume`.

        Args:
            request: the prompt and the options. Stop strings are left to the other engine.
            deliver: receives the handover. Its arrays are on the devices of this engine.
            sample: see `submit`.

        Returns:
            A function that cancels the request.

        Raises:
            ConfigError: the prompt does not fit; see `check`.
            AxcoreError: the engine is closed.
        """
        options = request.options
        first = dataclasses.replace(options, max_tokens=1, min_tokens=min(options.min_tokens, 1), stop=())
        request = dataclasses.replace(request, options=first)
        self.check(request)

        def exported(piece: Piece, state: RowState, adapter: str | None) -> None:
            logprob = piece.logprobs[0] if piece.logprobs else None
            ids, scores = request.ids + piece.ids, piece.prompt_logprobs
            deliver(Handover(self._identity.text, adapter, ids, state, logprob, scores, piece.num_cached))

        return self._queue(request, deliver, sample=sample, export=exported)

    def resume(self, request: Request, handover: Handover, deliver: Deliver, *, sample: int = 0) -> Callable[[], None]:
        """Continues a request whose prompt another engine has computed. It delivers the first token, too, or an error
        if the other engine has other weights of the adapter.

        Args:
            request: the request that was exported.
            handover: what the other engine delivered.
            deliver, sample: see `submit`.

        Returns:
            A function that cancels the request.

        Raises:
            ConfigError: the request does not fit, or the handover belongs to another request, another model, or an
                engine with another cache.
            AxcoreError: the engine is closed.
        """
        self.check(request)
        handover.check(request, self._identity.text, self.vocab_size)
        self._core.state_programs.layout.check(handover.state)
        return self._queue(request, deliver, sample=sample, handover=handover)

    def _queue(
        self,
        request: Request,
        deliver: Deliver,
        *,
        sample: int,
        handover: Handover | None = None,
        export: Export | None = None,
    ) -> Callable[[], None]:
        """Queues a checked request. Returns a function that cancels it.

        Args:
            request, deliver, sample: see `submit`.
            handover: the prompt and the first token, which another engine has computed.
            export: receives the first token and the state of the prompt, in place of a call of `deliver`. The sample
                ends with its first token.
        """
        sequence = Sequence(next(self._numbers), request, self.eos_ids)
        text = guide = None
        if self.tokenizer is not None and export is None:
            text = TextStream(self.tokenizer, prompt=request.ids, stop=request.options.stop)
        if self._grammars is not None:
            guide = self._grammars.guide(request.options)
        pooled = None if request.pooling is None else PooledStates(request.pooling)
        is_drafted = self._core.drafter is not None and request.pooling is None
        sequence.needs_last_token, sequence.is_exported = guide is not None or is_drafted, export is not None
        seed = seed_words(request.options.seed, sample)
        return self._loop.submit(Sample(sequence, deliver, seed, text, guide, pooled, export), handover)

    def warm_up(
        self,
        methods: Iterable[Method] = ("greedy", "plain", "full"),
        *,
        prompt_logprobs: bool = False,
        embeddings: bool = False,
        handovers: bool = False,
    ) -> None:
        """Compiles the programs of every bucket. Later requests compile only for many logit edits or log-probabilities.

        Args:
            methods: the sampling methods to compile.
            prompt_logprobs: whether to compile the programs that score prompts.
            embeddings: whether to compile the programs for embeddings.
            handovers: whether to compile the programs for `export` and `resume`. Those that the config of the engine
                or its `prefill` need are compiled anyway.

        Raises:
            ConfigError: `embeddings` is set, and the model has none.
            AxcoreError: the engine is closed meanwhile.
        """
        if embeddings:
            self._check_embeddings()
        if self._grammars is not None:
            self._grammars.warm_up()
        asked = WarmUp(
            methods=tuple(methods),
            prompt_logprobs=prompt_logprobs,
            embeddings=embeddings,
            grammars=self._grammars is not None,
            transfers=handovers
            or self._prefill is not None
            or self.config.host_cache_bytes > 0
            or self.config.prefix_states > 0,
        )
        self._loop.in_thread(functools.partial(self._core.warm_up, asked, self._loop.check_open))

    def close(self) -> None:
        """Ends the engine and frees its caches. Unfinished samples get an error. A warm-up ends with an error after the
        programs that compile at that moment.

        It may be called from any thread, also more than once. In `deliver`, it does not wait for the end.
        """
        self._loop.close()
