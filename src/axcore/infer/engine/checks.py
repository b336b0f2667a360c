"""Checks of the config of an engine against its model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from axcore.config import ConfigError
from axcore.infer.decoding.decoder import Decoder
from axcore.infer.execution.row_state import StateLayout, host_limits
from axcore.infer.scheduling.host_pool import HostLimits
from axcore.infer.speculation import Drafter

if TYPE_CHECKING:
    from axcore.infer.engine import Engine

_logger = logging.getLogger(__name__)


def check_config(cfg: Engine.Config, decoder: Decoder, *, has_draft_model: bool) -> None:
    """Checks the config of an engine against its model. Warns if prompts share no prefixes although they could.

    Args:
        cfg: the config.
        decoder: the model with its decoding state.
        has_draft_model: whether the engine was given one.

    Raises:
        ConfigError: a field does not suit the model or the draft model.
    """
    if cfg.speculation is None and has_draft_model:
        raise ConfigError("draft_model has no effect with engine.speculation=None. Set speculation=DraftModel.Config()")
    limit = min(decoder.recompute_above, default=cfg.max_len)
    if cfg.prefix_states:
        _check_prefix_states(cfg, decoder, limit)
    if cfg.prefix_caching and decoder.unpaged and not cfg.prefix_states:
        raise ConfigError(
            f"engine.prefix_caching=True requires pages in every layer that keeps decoding state, and "
            f"{decoder.unpaged[0]} has none. Choose a cache with pages if it is a cache, such as that of "
            f"axcore-paged-kv; otherwise set prefix_states, or leave prefix_caching out"
        )
    if cfg.prefix_caching and not (decoder.shares_prefixes or cfg.prefix_states):
        raise ConfigError(
            f"engine.prefix_caching=True: the keys of a row change when it passes {limit} tokens, so rows cannot share "
            f"them. Leave prefix_caching out"
        )
    if cfg.burst_tokens is not None and not decoder.shares_prefixes:
        raise ConfigError(
            f"engine.burst_tokens={cfg.burst_tokens} requires a cache with pages in every layer, such as that of "
            f"axcore-paged-kv, so that a step computes many prompts. Choose one, or leave burst_tokens out"
        )
    if cfg.speculation is not None:
        _check_speculation(cfg, cfg.speculation, decoder)
    reads_all = cfg.speculation is not None and cfg.speculation.reads_hidden_states
    can_save = decoder.paging is not None and decoder.unpaged and not decoder.recompute_above and not reads_all
    if can_save and not cfg.prefix_states and cfg.prefix_caching is None:
        _logger.warning(
            "prompts share no prefixes, since the state of %s is not in pages. Set engine.prefix_states "
            "(`axcore serve --prefix-states`) to the number of states to save, or engine.prefix_caching=False",
            decoder.unpaged[0],
        )


def _check_prefix_states(cfg: Engine.Config, decoder: Decoder, limit: int) -> None:
    where = f"engine.prefix_states={cfg.prefix_states}"
    if cfg.prefix_caching is False:
        raise ConfigError(f"{where} has no use with engine.prefix_caching=False. Leave one of them out")
    if decoder.paging is None:
        raise ConfigError(
            f"{where} requires a cache with pages in some layer, such as that of axcore-paged-kv, since prefixes are "
            f"shared page by page. Choose one, or set prefix_states=0"
        )
    if decoder.recompute_above:
        raise ConfigError(
            f"{where}: the keys of a row change when it passes {limit} tokens, so rows cannot share them. Set "
            f"prefix_states=0"
        )
    if not decoder.unpaged:
        raise ConfigError(
            f"{where} has no use, since all decoding state of the model is in pages, which rows share. Set "
            f"prefix_states=0"
        )
    if cfg.speculation is not None and cfg.speculation.reads_hidden_states:
        raise ConfigError(
            f"{where}: engine.speculation reads the hidden states of all tokens, so prompts cannot share prefixes. Set "
            f"prefix_states=0, or use another drafter"
        )


def _check_speculation(cfg: Engine.Config, speculation: Drafter.Config, decoder: Decoder) -> None:
    count = speculation.num_speculative_tokens
    where = f"engine.speculation.num_speculative_tokens={count}"
    if cfg.preemption == "offload" and speculation.reads_hidden_states:
        raise ConfigError(
            "engine.preemption='offload': engine.speculation reads the hidden states of all tokens, which a copy of "
            "the decoding state lacks. Set preemption='recompute', or use another drafter"
        )
    if cfg.prefix_caching and speculation.reads_hidden_states:
        raise ConfigError(
            "engine.prefix_caching=True: engine.speculation reads the hidden states of all tokens, which pages lack. "
            "Leave prefix_caching out, or use another drafter"
        )
    if cfg.burst_tokens is not None and speculation.reads_hidden_states:
        raise ConfigError(
            f"engine.burst_tokens={cfg.burst_tokens}: engine.speculation reads the hidden states of all tokens, so "
            f"prompts are not computed together. Leave burst_tokens out, or use another drafter"
        )
    if decoder.max_rollback is not None and count > decoder.max_rollback:
        layer = decoder.least_rollback_in
        if decoder.max_rollback == 0:
            raise ConfigError(
                f"{where}: {layer} keeps state that cannot be rolled back, so rejected drafts cannot be dropped. Set "
                f"speculation=None, or use a model without such layers"
            )
        raise ConfigError(
            f"{where}: {layer} can drop at most {decoder.max_rollback} tokens of a row, such as rejected drafts. "
            f"Reduce num_speculative_tokens, or use a cache that keeps more tokens, such as a ring with more spare"
        )


def check_num_states(cfg: Engine.Config, num_pages: int) -> None:
    """Checks `cfg.prefix_states`.

    Args:
        cfg: the config.
        num_pages: the number of pages, on the device and in host memory. A state is saved at the end of one.

    Raises:
        ConfigError: there are more states than pages.
    """
    if cfg.prefix_states > num_pages:
        raise ConfigError(
            f"engine.prefix_states={cfg.prefix_states} exceeds the {num_pages} pages of the cache, at whose ends "
            f"states are saved. Set it to at most {num_pages}"
        )


def checked_host_limits(cfg: Engine.Config, layout: StateLayout, *, shares_prefixes: bool) -> HostLimits:
    """The number of pages and slots in host memory.

    Args:
        cfg: the config.
        layout: the arrays of the decoding state.
        shares_prefixes: whether prompts share pages.

    Raises:
        ConfigError: `cfg.host_cache_bytes` has no room or no use for any.
    """
    offloads = cfg.preemption == "offload"
    if cfg.host_cache_bytes and not (offloads or shares_prefixes):
        raise ConfigError(
            f"engine.host_cache_bytes={cfg.host_cache_bytes} has no use, since the engine neither offloads preempted "
            f"samples nor shares prefixes. Set preemption='offload', or host_cache_bytes=0"
        )
    limits = host_limits(layout, cfg.host_cache_bytes, max_rows=cfg.max_rows, offloads_preempted=offloads)
    has_room = limits.num_slots != 0 and (limits.num_pages or not layout.pages)
    if not has_room and (offloads or cfg.host_cache_bytes):
        least = layout.page_bytes + (2 if layout.pages else 1) * layout.slot_bytes
        raise ConfigError(
            f"engine.host_cache_bytes={cfg.host_cache_bytes} has no room for decoding state, which takes "
            f"{layout.page_bytes} bytes a page and {layout.slot_bytes} bytes a row. Set it to at least {least}, or "
            f"preemption='recompute' and host_cache_bytes=0"
        )
    return limits
