"""The counters of an engine."""

from __future__ import annotations

import dataclasses

from axcore.infer.scheduling.pages import PageUsage


@dataclasses.dataclass(kw_only=True)
class EngineStats:
    """Counters of an engine. `Engine.stats` returns a copy, which does not change later.

    Attributes:
        running, waiting: samples with and without a row.
        preempted: how often a sample lost its row to another.
        steps: steps so far.
        tokens: tokens sampled so far.
        prompt_tokens: tokens of the prompts so far.
        cached_tokens: those of them that were found in the cache.
        draft_tokens: drafts that were verified so far.
        accepted_tokens: those of them that the model samples, too.
        compiled: programs compiled so far.
        pages: the pages of the caches; None: they have none.
        host_pages: the pages in host memory; None: there are none.
        saved_states: the states that are saved at page boundaries, see `Engine.Config.prefix_states`.
        offloaded: how often the state of a preempted sample was copied to host memory, instead of being computed again.
        bytes_to_host, bytes_to_device: decoding state that was copied so far.
    """

    running: int = 0
    waiting: int = 0
    preempted: int = 0
    steps: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    compiled: int = 0
    pages: PageUsage | None = None
    host_pages: PageUsage | None = None
    saved_states: int = 0
    offloaded: int = 0
    bytes_to_host: int = 0
    bytes_to_device: int = 0
