"""What an engine runs on the device, and what plans it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from axcore.infer.decoding.decoder import Decoder
from axcore.infer.engine.checks import check_config, check_num_states, checked_host_limits
from axcore.infer.execution.programs import Programs
from axcore.infer.execution.row_state import StateLayout
from axcore.infer.execution.runner import Runner
from axcore.infer.execution.state_programs import StatePrograms
from axcore.infer.execution.transfers import Transfers
from axcore.infer.execution.warm_up import WarmUp, compile_programs
from axcore.infer.loaded_adapters import LoadedAdapters
from axcore.infer.scheduling.pages import PagePool
from axcore.infer.scheduling.prefix_states import PrefixStates
from axcore.infer.scheduling.scheduler import Scheduler
from axcore.infer.speculation import Target, keeping_hidden_states
from axcore.infer.stats import EngineStats
from axcore.module import Layer
from axcore.parallel import Layout

if TYPE_CHECKING:
    from axcore.infer.engine import Engine


class EngineCore:
    """The parts of an engine that compute: the model with its decoding state, the scheduler, and the drafter.

    Only the thread of an `EngineLoop` runs or changes them. Other threads read sizes and counters.

    Args:
        cfg: the config of the engine.
        model, layout, draft_model: see `Engine`.
        eos_ids: the tokens that end a sample.

    Attributes:
        adapters: what adapters are and how they are loaded; None: the engine has no adapters.
        loaded: the adapters that requests can use.
        programs: the compiled programs, which own the decoding state.
        state_programs: the programs that read and write parts of it.
        transfers: moves decoding state out of the device and back.
        runner: runs the plans of the scheduler.
        scheduler: plans the steps.
        drafter: proposes drafts; None: no speculative decoding.

    Raises:
        ConfigError: a field of the config does not suit the model or the draft model.
    """

    def __init__(
        self,
        cfg: Engine.Config,
        model: Layer,
        *,
        eos_ids: Collection[int],
        layout: Layout | None,
        draft_model: Layer | None,
    ):
        speculation = cfg.speculation
        self.adapters = None if cfg.adapters is None else cfg.adapters.build()
        self.loaded = LoadedAdapters(0 if cfg.adapters is None else cfg.adapters.max_adapters)
        decoder, params, state = Decoder.of(
            model,
            cache=cfg.cache,
            batch_size=cfg.max_rows,
            max_len=cfg.max_len,
            layout=layout,
            adapters=self.adapters,
            max_rollback=0 if speculation is None else speculation.num_speculative_tokens,
        )
        check_config(cfg, decoder, has_draft_model=draft_model is not None)
        if speculation is not None and speculation.reads_hidden_states:
            decoder, state = keeping_hidden_states(decoder, state, model)
        vocab_size = getattr(model.config, "vocab_size", None)
        self.programs = programs = Programs(decoder, params, state, vocab_size, eos_ids=eos_ids, adapters=self.adapters)
        self.drafter = None
        if speculation is not None:
            target = Target(model, decoder, lambda: programs.state, programs.vocab_size, draft_model)
            self.drafter = speculation.build(target)
        pool = None
        if decoder.paging is not None:
            shares = (decoder.shares_prefixes or cfg.prefix_states > 0) and cfg.prefix_caching is not False
            pool = PagePool(decoder.paging.num_pages, decoder.paging.page_size, shares_prefixes=shares)
        state_layout = StateLayout(decoder, state)
        host = checked_host_limits(cfg, state_layout, shares_prefixes=pool is not None and pool.shares_prefixes)
        if pool is not None:
            check_num_states(cfg, pool.num_pages + host.num_pages)
        self.state_programs = StatePrograms(programs, state_layout)
        self.transfers = Transfers(self.state_programs, host, cfg.prefix_states)
        self._states = PrefixStates(cfg.prefix_states) if cfg.prefix_states else None
        self._pool, self._buckets, self._num_drafts = pool, cfg.buckets(decoder), cfg.num_drafts
        self.runner = Runner(programs, self.transfers, self._buckets, self._num_drafts)
        self.scheduler = Scheduler(cfg.limits(decoder), pool, host, self._states)

    def stats(self, counters: EngineStats) -> EngineStats:
        """The counters now.

        Args:
            counters: those of the steps and tokens so far; others are replaced.
        """
        scheduler, pool, host_pages = self.scheduler, self._pool, self.scheduler.host.pages
        num_traced = self.programs.num_traced + self.state_programs.num_traced
        return dataclasses.replace(
            counters,
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            preempted=scheduler.num_preempted,
            offloaded=scheduler.host.num_offloaded,
            compiled=num_traced + (0 if self.drafter is None else self.drafter.num_traced),
            pages=None if pool is None else pool.usage,
            host_pages=None if host_pages is None else host_pages.usage,
            saved_states=0 if self._states is None else self._states.num_saved,
            bytes_to_host=self.transfers.bytes_to_host,
            bytes_to_device=self.transfers.bytes_to_device,
        )

    def warm_up(self, asked: WarmUp, check: Callable[[], None]) -> None:
        """Compiles the programs of every bucket. The state does not change.

        Args:
            asked: what else to compile.
            check: raises to end the warm-up early; see `Compiler.compile`.
        """
        compile_programs(self.programs, self._buckets, self._num_drafts, asked, check)
        if asked.transfers:
            self.state_programs.warm_up()
        if self.drafter is not None:
            self.drafter.warm_up(asked.methods)

    def free(self) -> None:
        """Waits for the device, and frees its memory. Nothing may run afterwards."""
        if self.drafter is not None:
            self.drafter.close()
        self.transfers.free()
        self.programs.free()
