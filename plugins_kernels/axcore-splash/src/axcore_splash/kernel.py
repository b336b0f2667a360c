"""The Splash attention kernel."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import jax.numpy as jnp

import axcore as ax
from axcore.nn import (
    Attention,
    AttentionInputs,
    FusedKernel,
    KernelRequest,
    MaskForm,
    Settings,
    TunableKernel,
    mask_refusal,
    put_kernel,
)
from axcore_splash.blocks import LANES, Blocks, default_block, padded
from axcore_splash.fused import attention
from axcore_splash.primitives import Form, Segments

MEASURED_BLOCKS = (256, 512, 1024, 2048)
"""The sizes of blocks that `axcore tune` tries, where they do not exceed the padded sequence."""


class SplashKernel(FusedKernel, TunableKernel):
    """Splash attention on TPUs (`jax.experimental.pallas.ops.tpu.splash_attention`), in bfloat16 and float32.

    It supports full attention, causal masks, sliding windows, packed rows, softcap, sinks and the log-sum-exp. Blocks
    of keys that the mask hides are not loaded; documents of packed rows are separated within the blocks. Sequences are
    padded to whole blocks. The values `heads` and `lse` are tagged for remat policies; a policy that saves both avoids
    rerunning the kernel in the backward pass.
    """

    class Config(TunableKernel.Config):
        block_q: ax.PositiveInt | None = None
        """Queries in a block of the forward kernel. All blocks are multiples of 128, and limited to the length of the
        sequence. None: 512, or less if 512 would pad the sequence by more than an eighth."""
        block_kv: ax.PositiveInt | None = None
        """Keys in a block of the forward kernel; None: as for `block_q`."""
        block_kv_compute: ax.PositiveInt | None = None
        """Keys in one matrix product of the forward kernel, a divisor of `block_kv`; None: `block_kv`."""
        block_q_dkv: ax.PositiveInt | None = None
        """Queries in a block of the kernel for the gradients of keys and values; None: as for `block_q`."""
        block_kv_dkv: ax.PositiveInt | None = None
        """Keys in a block of the kernel for the gradients of keys and values; None: as for `block_q`."""
        block_kv_dkv_compute: ax.PositiveInt | None = None
        """Keys in one matrix product of that kernel, a divisor of `block_kv_dkv`; None: `block_kv_dkv`."""
        block_q_dq: ax.PositiveInt | None = None
        """Queries in a block of the kernel for the gradient of queries; None: as for `block_q`."""
        block_kv_dq: ax.PositiveInt | None = None
        """Keys in a block of the kernel for the gradient of queries; None: as for `block_q`."""
        fused_backward: bool = False
        """Whether one kernel computes all gradients. It computes the logits once instead of twice, but writes a partial
        gradient of the queries for every block of keys to HBM."""
        interpret: bool = False
        """Whether the Pallas interpreter runs the kernels on a CPU, which is slow. For tests."""

    attention = attention
    takes = frozenset({"softcap", "sinks", "lse"})

    config: Config

    def __init__(self, cfg: Config, *, rngs: ax.Rngs):
        if (problem := _blocks(cfg, {}).problem()) is not None:
            raise ax.ConfigError(problem)

    def supports(self, request: KernelRequest) -> str | None:
        """See `axcore.nn.AttentionKernel`."""
        if self.config.interpret and request.platform != "cpu":
            return f"interpret=True is for tests on a CPU, got {request.platform}"
        if not self.config.interpret and request.platform != "tpu":
            return f"requires a TPU, got {request.platform}"
        if request.dtype not in (jnp.bfloat16, jnp.float32):
            return f"computes in bfloat16 or float32, not {request.dtype} (the model's dtypes.compute)"
        return mask_refusal(request, windows="any", documents="any")

    def candidates(self, request: KernelRequest) -> Iterator[dict[str, int]]:
        """See `axcore.nn.TunableKernel`: all blocks of queries have one size, and all blocks of keys another."""

        def settings(q: int, kv: int) -> dict[str, int]:
            kernels = ("", "_dkv") if self.config.fused_backward else ("", "_dkv", "_dq")
            return {f"block_{kind}{each}": size for each in kernels for kind, size in (("q", q), ("kv", kv))}

        lengths = request.query_len, request.key_len
        yield settings(*map(default_block, lengths))
        sizes = ([size for size in MEASURED_BLOCKS if size <= padded(length, LANES)] for length in lengths)
        yield from (settings(q, kv) for q, kv in itertools.product(*sizes))

    def settings(self, request: KernelRequest) -> dict[str, int]:
        """See `axcore.nn.TunableKernel`.

        Raises:
            ConfigError: measured sizes are not valid, alone or together with the fields of the config.
        """
        found = super().settings(request)
        if (problem := _blocks(self.config, found).problem()) is not None:
            raise ax.ConfigError(f"tuning: {problem}. Or measure again with `axcore tune RECIPE --out FILE`")
        return found

    def form(self, inputs: AttentionInputs) -> Form:
        """See `FusedKernel`."""
        mask = _form_of(inputs)
        return Form(
            scale=inputs.scale,
            causal=mask.causal,
            window=mask.window,
            softcap=inputs.softcap,
            blocks=_blocks(self.config, self.settings(KernelRequest.of(inputs))),
            interpret=self.config.interpret,
        )

    def operands(self, inputs: AttentionInputs) -> Segments | None:
        """Segment ids that separate documents and hide invalid keys; None if neither is needed."""
        query, key = inputs.query, inputs.keys.tokens
        of_queries, of_keys = (query.segment_ids, key.segment_ids) if _form_of(inputs).documents else (None, None)
        if of_queries is None or of_keys is None:  # as in `SameSegment`, tokens without segment ids are not separated
            if key.valid is None:
                return None
            of_queries = jnp.zeros(inputs.q.shape[:2], jnp.int32)
            of_keys = jnp.zeros((inputs.q.shape[0], inputs.keys.shape[1]), jnp.int32)
        if key.valid is not None:
            of_keys = jnp.where(key.valid, of_keys, -1)
        return of_queries, of_keys


def use_splash(
    cfg: ax.Config, interpret: bool = False, fused_backward: bool = False, where: ax.Where = Attention
) -> ax.Config:
    """Fills the kernel slot of every selected attention with Splash attention.

    Args:
        interpret, fused_backward: see `SplashKernel.Config`.
        where: selects attentions.
    """
    return put_kernel(cfg, SplashKernel.Config(interpret=interpret, fused_backward=fused_backward), where)


def _blocks(cfg: SplashKernel.Config, settings: Settings) -> Blocks:
    return Blocks(**{**{field.name: getattr(cfg, field.name) for field in dataclasses.fields(Blocks)}, **settings})


def _form_of(inputs: AttentionInputs) -> MaskForm:
    mask = MaskForm.of(inputs.mask)
    assert mask is not None  # see `SplashKernel.supports`
    return mask
