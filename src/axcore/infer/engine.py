"""An engine that answers many requests with one model by continuous batching."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from jaxtyping import Float

from axcore import config
from axcore.config import REQUIRED, AxcoreError, ConfigError, NonNegativeInt, PositiveInt
from axcore.config.types import conforms
from axcore.infer.adapters import Adapters
from axcore.infer.beams import Beam, BeamOptions, beam_search
from axcore.infer.buckets import Buckets
from axcore.infer.decoder import Decoder
from axcore.infer.disaggregation import Handovers
from axcore.infer.embeddings import normalized
from axcore.infer.engine_checks import check_config, checked_host_limits
from axcore.infer.grammar import GrammarCompiler
from axcore.infer.guide import Grammars
from axcore.infer.handover import DeliverHandover, Export, Handover, Prefill
from axcore.infer.loaded_adapters import LoadedAdapters
from axcore.infer.loop import EngineLoop
from axcore.infer.pages import PagePool
from axcore.infer.programs import Programs
from axcore.infer.requests import Piece, Pooling, Request, SamplingOptions, TokenLogprob
from axcore.infer.row_state import StateLayout
from axcore.infer.runner import Runner
from axcore.infer.sampling import Method
from axcore.infer.scheduler import Scheduler, SchedulerLimits
from axcore.infer.speculation import Drafter, Target, keeping_hidden_states
from axcore.infer.stats import EngineStats
from axcore.infer.streams import Deliver, Stream, pieces_of
from axcore.infer.text import TextStream
from axcore.infer.transfers import Transfers
from axcore.module import Layer
from axcore.nn import ContiguousCache, KVCache
from axcore.parallel import Layout

if TYPE_CHECKING:
    from axcore.train.data.tokenizers import Tokenizer


class Engine(config.Configurable):
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
        are left. The last prompt of a burst then waits less for its first token, and rows that decode wait longer for
        their next. Requires a cache with pages in every layer. None: `step_tokens` always applies."""
        page_tables: PositiveInt = 1
        """The number of sizes of page tables for which programs are compiled, each a quarter of the next. More sizes
        decode short rows faster with a kernel that reads the whole table, such as the reference kernel."""
        adapters: Adapters.Config | None = None
        """Room for adapters, which requests choose by name, such as that of axcore-lora; None: no adapters."""
        prefix_caching: bool | None = None
        """Whether prompts share the pages of equal prefixes; None: if all caches of the model have pages."""
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
        self._model = model.config
        self._adapters = None if cfg.adapters is None else cfg.adapters.build()
        decoder, params, state = Decoder.of(
            model,
            cache=cfg.cache,
            batch_size=cfg.max_rows,
            max_len=cfg.max_len,
            layout=layout,
            adapters=self._adapters,
            max_rollback=0 if cfg.speculation is None else cfg.speculation.num_speculative_tokens,
        )
        check_config(cfg, decoder, has_tokenizer=tokenizer is not None, has_draft_model=draft_model is not None)
        if cfg.speculation is not None and cfg.speculation.reads_hidden_states:
            decoder, state = keeping_hidden_states(decoder, state, model)
        self.config, self.tokenizer, self.eos_ids = cfg, tokenizer, tuple(eos_ids)
        vocab_size = getattr(model.config, "vocab_size", None)
        self._programs = Programs(decoder, params, state, vocab_size, adapters=self._adapters)
        self._loaded = LoadedAdapters(0 if cfg.adapters is None else cfg.adapters.max_adapters)
        self._drafter = None
        if cfg.speculation is not None:
            programs = self._programs
            target = Target(model, decoder, lambda: programs.state, programs.vocab_size, draft_model)
            self._drafter = cfg.speculation.build(target)
        self._pool = None
        if decoder.paging is not None:
            shares = decoder.shares_prefixes and cfg.prefix_caching is not False
            self._pool = PagePool(decoder.paging.num_pages, decoder.paging.page_size, shares_prefixes=shares)
        self._grammars = None
        if cfg.grammars is not None and tokenizer is not None:
            self._grammars = Grammars(cfg.grammars, tokenizer, self.vocab_size, self.eos_ids)
        kept = StateLayout(decoder, state)
        host = checked_host_limits(cfg, kept, shares_prefixes=self._pool is not None and self._pool.shares_prefixes)
        self._transfers = Transfers(self._programs, kept, host)
        runner = Runner(self._programs, self._transfers, cfg.buckets(decoder), self.eos_ids, cfg.num_drafts)
        self._scheduler = Scheduler(cfg.limits(decoder), self._pool, host)
        self._loop = EngineLoop(self._scheduler, runner, self._programs.free, self.eos_ids, self._loaded, self._drafter)
        self._handovers = Handovers(model, kept, self.vocab_size, prefill, check=self.check, queue=self._queue)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def vocab_size(self) -> int:
        """The number of token ids of the model."""
        return self._programs.vocab_size

    @property
    def max_len(self) -> int:
        """The largest number of tokens of a row, its prompt included, that the config and the page pool allow."""
        return self._scheduler.max_len

    @property
    def is_closed(self) -> bool:
        """Whether the engine was closed or has failed, so that it takes no more requests."""
        return self._loop.is_closed

    @property
    def stats(self) -> EngineStats:
        """The counters now."""
        scheduler, pool = self._scheduler, self._pool
        return dataclasses.replace(
            self._loop.counters,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting + self._handovers.num_pending,
            preempted=scheduler.num_preempted,
            offloaded=scheduler.host.num_offloaded,
            compiled=self._programs.num_traced
            + self._transfers.programs.num_traced
            + (0 if self._drafter is None else self._drafter.num_traced),
            pages=None if pool is None else pool.usage,
            host_pages=None if scheduler.host.pages is None else scheduler.host.pages.usage,
            bytes_to_host=self._transfers.bytes_to_host,
            bytes_to_device=self._transfers.bytes_to_device,
        )

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters, which requests may have as `adapter`."""
        return self._loaded.names

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
        if self._adapters is None:
            raise ConfigError(
                f"adapter {name!r}: the engine has no room for adapters. Set engine.adapters, for example to that of "
                f"axcore-lora"
            )
        if not isinstance(name, str) or not name:
            raise ConfigError(f"the name of an adapter must be a text, not {name!r}. Use the name that requests give")
        try:
            arrays = self._adapters.arrays(source, self._model, self._programs.state_shapes)
        except AxcoreError as error:
            error.add_note(f"while loading the adapter {name!r}")
            raise

        identity = self._adapters.identity(arrays)

        def load() -> None:
            slot = self._loaded.free_slot(name, self._scheduler.adapters)
            self._programs.write_adapter(arrays, slot)
            self._loaded.add(name, slot, identity)

        self._loop.in_thread(load)

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter. Later requests with its name are refused. Running requests keep it until they end.

        Raises:
            AxcoreError: it is not loaded.
        """
        self._loop.in_thread(functools.partial(self._loaded.remove, name))

    def request(self, prompt: str, options: SamplingOptions | None = None, *, adapter: str | None = None) -> Request:
        """A request for a text.

        Raises:
            ConfigError: the engine has no tokenizer.
        """
        if self.tokenizer is None:
            raise ConfigError("engine.request requires a tokenizer. Give the engine one, or create a Request of ids")
        ids = self.tokenizer.prompt(prompt.encode("utf-8", "surrogateescape"))
        return Request(tuple(ids.tolist()), options or SamplingOptions(), adapter=adapter)

    def check(self, request: Request) -> None:
        """Checks a request without queueing it. May be called from any thread. Compiles its grammar, which may take
        long if no recent request had it.

        Raises:
            ConfigError: `request` is not a `Request`, it does not fit, a token id is not in the vocabulary, a stop
                string requires a tokenizer, the grammar is not valid or not supported, or the adapter is not loaded.
        """
        if not isinstance(request, Request):
            raise ConfigError(
                f"{request!r} is not a Request. Use engine.request(text, SamplingOptions(...)), or Request(ids=...)"
            )
        request.check(self.vocab_size)
        if request.pooling is not None:
            self._check_embeddings()
        if request.adapter is not None:
            self._loaded.find(request.adapter)
        options = request.options
        if options.stop and self.tokenizer is None:
            raise ConfigError(
                f"sampling.stop={options.stop!r} requires a tokenizer. Give the engine one, or use stop_token_ids"
            )
        self._scheduler.check(request)
        if options.grammar is not None:
            if self._grammars is None:
                raise ConfigError(
                    "sampling.grammar requires a grammar compiler. Install a plugin that offers one (`axcore plugins` "
                    "lists them), and set engine.grammars to its Config (`axcore serve --grammars NAME`)"
                )
            self._grammars.check(options.grammar)

    def _check_embeddings(self) -> None:
        if self._drafter is not None and self._drafter.config.reads_hidden_states:
            raise ConfigError("request.pooling: the hidden states go to engine.speculation. Use another drafter")
        if not self._programs.decoder.has_hidden_states:
            raise ConfigError("request.pooling: the model has no layer `norm` before its head, so it has no embeddings")

    def submit(self, request: Request, deliver: Deliver, *, sample: int = 0) -> Callable[[], None]:
        """Queues a request.

        Args:
            request: the prompt and the options.
            deliver: receives the pieces of the sample, the last of which has a `finish_reason`, or an error.
                If it raises, the exception is logged and the sample ends.
            sample: the index of the sample, if a request has several: it changes what a seed draws.

        Returns:
            A function that cancels the request. It may be called at any time, from any thread.

        Raises:
            ConfigError: see `check`.
            AxcoreError: the engine is closed.
        """
        self.check(request)
        if self._handovers.prefill is not None and request.pooling is None:
            return self._handovers.submit(request, deliver, sample=sample)
        return self._queue(request, deliver, sample=sample)

    def _queue(
        self,
        request: Request,
        deliver: Deliver,
        *,
        sample: int,
        handover: Handover | None = None,
        export: Export | None = None,
    ) -> Callable[[], None]:
        """See `axcore.infer.disaggregation.Queue`."""
        text = guide = None
        if self.tokenizer is not None and export is None:
            text = TextStream(self.tokenizer, prompt=request.ids, stop=request.options.stop)
        if self._grammars is not None:
            guide = self._grammars.guide(request.options)
        return self._loop.submit(request, deliver, text, guide, sample=sample, handover=handover, export=export)

    def export(self, request: Request, deliver: DeliverHandover, *, sample: int = 0) -> Callable[[], None]:
        """Computes the prompt of a request and its first token, for another engine that continues it with `resume`.
        Returns a function that cancels it. See `axcore.infer.disaggregation.Handovers`.

        Raises:
            ConfigError: the prompt does not fit; see `check`.
            AxcoreError: the engine is closed.
        """
        return self._handovers.export(request, deliver, sample=sample)

    def resume(self, request: Request, handover: Handover, deliver: Deliver, *, sample: int = 0) -> Callable[[], None]:
        """Continues a request whose prompt another engine has computed. It delivers the first token, too. Returns a
        function that cancels it. See `axcore.infer.disaggregation.Handovers`.

        Raises:
            ConfigError: the request does not fit, or the handover belongs to another request, model or cache.
            AxcoreError: the engine is closed.
        """
        return self._handovers.resume(request, handover, deliver, sample=sample)

    def stream(self, request: Request, *, sample: int = 0) -> Stream:
        """Submits a request. Returns an iterator over the pieces of the sample; for errors see `submit`."""
        return Stream(functools.partial(self.submit, request, sample=sample))

    def astream(self, request: Request, *, sample: int = 0) -> AsyncIterator[Piece]:
        """`stream` for asyncio. It submits when the first piece is awaited. A consumer that stops early cancels."""
        check = functools.partial(self.check, request)
        return pieces_of(functools.partial(self.submit, request, sample=sample), check)

    def generate(self, requests: Iterable[Request], *, n: int = 1) -> list[Piece]:
        """Computes the samples of several requests together, each as one piece.

        Args:
            requests: the requests.
            n: the number of samples of each request, which compute its prompt once if the caches have pages.

        Returns:
            The samples of the first request, then those of the second, and so on.

        Raises:
            AxcoreError: a request does not fit, or the engine failed.
        """
        if not conforms(n, PositiveInt):
            raise ConfigError(f"engine.generate: n must be an int of at least 1, not {n!r}")
        if isinstance(requests, str | Request):
            raise ConfigError("engine.generate takes a list of requests, not one. Use engine.generate([request])")
        streams = [self.stream(request, sample=sample) for request in requests for sample in range(n)]
        try:
            return [stream.result() for stream in streams]
        finally:
            for stream in streams:
                stream.cancel()

    def beam_search(
        self, prompts: Iterable[str | Sequence[int]], options: BeamOptions, *, adapter: str | None = None
    ) -> list[list[Beam]]:
        """The most likely outputs of each prompt that a beam search finds.

        Each step of the search submits a request for one token after each unfinished output, those of all prompts
        together. With prefix caching, it computes at most one page of tokens for each output; otherwise all its tokens.
        More than 20 beams and EOS tokens compile another program.

        Args:
            prompts: the text or the token ids of each prompt.
            options: the options.
            adapter: the name of a loaded adapter; None: the model alone.

        Returns:
            For each prompt the outputs, the best score first.

        Raises:
            AxcoreError: a prompt is empty or does not fit with `max_tokens`, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer; or the vocabulary has fewer tokens than
                `options.num_beams` and EOS tokens.
        """
        given = SamplingOptions(
            max_tokens=options.max_tokens, stop_token_ids=options.stop_token_ids, ignore_eos=options.ignore_eos
        )
        rows = list(self._ids(prompts))
        for ids in rows:
            self.check(Request(ids, given, adapter=adapter))
        stop_token_ids = given.all_stop_token_ids(self.eos_ids)
        found = beam_search(self.generate, rows, options, stop_token_ids, adapter=adapter)
        return [[self._with_text(ids, beam) for beam in beams] for ids, beams in zip(rows, found, strict=True)]

    def _with_text(self, prompt: tuple[int, ...], beam: Beam) -> Beam:
        if self.tokenizer is None:
            return beam
        stream = TextStream(self.tokenizer, prompt=prompt)
        text = stream.add(beam.ids) + stream.finish()
        return dataclasses.replace(beam, text=text)

    def score(
        self, prompts: Iterable[str | Sequence[int]], *, adapter: str | None = None
    ) -> list[tuple[TokenLogprob, ...]]:
        """The log-probability of each token of some rows but the first, given the tokens before it.

        Args:
            prompts: the text or the token ids of each row, fewer tokens than `max_len`.
            adapter: the name of a loaded adapter; None: the model alone.

        Raises:
            AxcoreError: a row does not fit, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer.
        """
        options = SamplingOptions(temperature=0.0, max_tokens=1, prompt_logprobs=True)
        pieces = self.generate(Request(ids, options, adapter=adapter) for ids in self._ids(prompts))
        return [piece.prompt_logprobs or () for piece in pieces]

    def embed(
        self,
        prompts: Iterable[str | Sequence[int]],
        *,
        pooling: Pooling = "last",
        normalize: bool = True,
        adapter: str | None = None,
    ) -> list[Float[np.ndarray, " embed"]]:
        """The embedding of each prompt: the hidden states of the last layer after the final norm, pooled.

        Args:
            prompts: the text or the token ids of each prompt, fewer tokens than `max_len`.
            pooling: `last`: the state of the last token; `mean`: the mean over all tokens of the prompt, which uses no
                cached prefix.
            normalize: whether embeddings have length 1.
            adapter: the name of a loaded adapter; None: the model alone.

        Returns:
            A float32 array [embed] for each prompt.

        Raises:
            AxcoreError: a prompt is empty or does not fit, the hidden states are not finite, or the engine failed.
            ConfigError: a prompt is a text, and the engine has no tokenizer; or the model has no hidden states.
        """
        pieces = self.generate(
            Request(ids, SamplingOptions(max_tokens=1), adapter=adapter, pooling=pooling) for ids in self._ids(prompts)
        )
        found = [piece.embedding for piece in pieces if piece.embedding is not None]
        return [normalized(each) for each in found] if normalize else found

    def _ids(self, prompts: Iterable[str | Sequence[int]]) -> Iterator[tuple[int, ...]]:
        """The token ids of prompts."""
        given = prompts if isinstance(prompts, str) else list(prompts)
        if isinstance(given, str) or any(isinstance(prompt, int | np.integer) for prompt in given):
            raise ConfigError(f"expected a list of prompts, not the single prompt {given!r}. Write it as [prompt]")
        for prompt in given:
            yield self.request(prompt).ids if isinstance(prompt, str) else tuple(map(int, prompt))

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
        self._loop.warm_up(
            tuple(methods),
            prompt_logprobs=prompt_logprobs,
            embeddings=embeddings,
            grammars=self._grammars is not None,
            transfers=handovers or self._handovers.prefill is not None or self.config.host_cache_bytes > 0,
        )

    def close(self) -> None:
        """Ends the engine and frees its caches. Unfinished samples get an error. A warm-up ends with an error after the
        programs that compile at that moment.

        It may be called from any thread, also more than once. In `deliver`, it does not wait for the end.
        """
        self._loop.close()
