"""The feature `moe`."""

from __future__ import annotations

from typing import Any, Literal

import axcore as ax
from axcore.config import walk
from axcore.nn import FeedForward, edit_layers
from axcore.train import Trainer
from axcore_moe.balance import LoadBalance
from axcore_moe.dead_experts import DeadExpertWarning
from axcore_moe.dispatch import Capacity, Dense, Dispatch, Dropless
from axcore_moe.exchange import Exchange
from axcore_moe.experts import Experts
from axcore_moe.layer import MoE
from axcore_moe.router import ExpertChoice, Router, TopK

DISPATCHES: dict[str, Dispatch] = {
    "dropless": Dropless(),
    "exchange": Exchange(),
    "capacity": Capacity(),
    "dense": Dense(),
}


def use_moe(
    cfg: ax.Config,
    num_experts: int,
    top_k: int = 2,
    every: int = 1,
    hidden_dim: int | None = None,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: bool = True,
    scale: float = 1.0,
    groups: int = 1,
    top_groups: int = 1,
    jitter: float = 0.0,
    router_bias: bool = False,
    expert_choice: bool = False,
    dispatch: Dispatch | Literal["dropless", "exchange", "capacity", "dense"] | None = None,
    capacity_factor: float | None = None,
    shared_experts: int = 0,
    balance: float | None = None,
    balance_scope: Literal["sequence", "batch", "global"] = "global",
    z_loss: float = 0.0,
    bias_rate: float | None = None,
    where: ax.Where = FeedForward,
) -> ax.Config:
    """Replaces every selected feed-forward block, or every n-th one, with a mixture of experts.

    Each expert has the config of the block that it replaces: its activation, gating, biases and initializers.

    Args:
        num_experts: experts of each mixture.
        top_k: number of experts of each token.
        every: the last of each `every` blocks becomes a mixture; a `Repeat` then repeats groups of `every` layers.
        hidden_dim: hidden features of each expert. None keeps the block's.
        score, normalize, scale, groups, top_groups, jitter: options of the router, see `TopK.Config`.
        router_bias: whether the router's logits have a learned bias.
        expert_choice: experts choose tokens, on average `top_k` experts per token. Not causal, see `ExpertChoice`.
        dispatch: how tokens are sent to experts; see `Dispatch`. None means `exchange`, which is expert parallelism if
            the mesh has the axis `expert`, or `dropless` with `expert_choice`.
        capacity_factor: capacity of an expert as a multiple of its fair share. Requires dispatch="capacity".
        shared_experts: number of experts that process every token. They form one block with `shared_experts` times the
            hidden features.
        balance: weight of the load-balance loss; 0 disables it. None means 0.01, or 0 with `bias_rate` or
            `expert_choice`.
        balance_scope: see `LoadBalance.scope`.
        z_loss: weight of the router's z-loss.
        bias_rate: balances without a loss, see `TopK.Config`. DeepSeek-V3 uses 0.001.
        where: which blocks.

    Raises:
        ConfigError: nothing is selected, or fewer blocks are selected than `every`.
    """
    if every < 1:
        raise ax.ConfigError(f"every must be at least 1, not {every}")
    router = _router(num_experts, top_k, expert_choice, jitter, score, normalize, scale, groups, top_groups, bias_rate)
    router = router.set(linear=router.linear.set(use_bias=router_bias))
    if dispatch is None:
        dispatch = "dropless" if expert_choice else "exchange"
    chosen = DISPATCHES.get(dispatch) if isinstance(dispatch, str) else dispatch
    if not isinstance(chosen, Dispatch):
        raise ax.ConfigError(
            f"dispatch={dispatch!r} is not a dispatch. Give a Dispatch, or one of {', '.join(DISPATCHES)}."
        )
    if capacity_factor is not None:
        if not isinstance(chosen, Capacity):
            raise ax.ConfigError(f"capacity_factor={capacity_factor} requires dispatch='capacity', not {dispatch!r}")
        chosen = chosen.set(factor=capacity_factor)
    if balance is None:
        balance = 0.01 if bias_rate is None and not expert_choice else 0.0
    elif balance and expert_choice:
        raise ax.ConfigError(f"balance={balance} has no effect with expert_choice, which gives all experts equal loads")
    changed: list[str] = []
    mixtures = [path for path, node in walk(cfg) if isinstance(node, MoE.Config)]

    def edit(path: str, block: Any, number: int) -> Any:
        if above := next((each for each in mixtures if path.startswith(f"{each}.")), None):
            raise ax.ConfigError(f"{above} is already a mixture of experts. Select other blocks with where=.")
        if number % every != every - 1:
            return block
        if not isinstance(block, FeedForward.Config):
            raise ax.ConfigError(f"only a FeedForward can become a mixture of experts, not {block!r}")
        changed.append(path)
        expert = block if hidden_dim is None else block.set(hidden_dim=hidden_dim)
        expert = expert.set(dtypes=None, tags=())
        shared = expert.set(hidden_dim=shared_experts * expert.hidden_dim) if shared_experts else None
        return MoE.Config(
            input_dim=block.input_dim,
            dtypes=block.dtypes,
            tags=block.tags,
            num_experts=num_experts,
            router=router,
            experts=Experts.Config(block=expert.set(input_dim=ax.REQUIRED)),
            dispatch=chosen,
            shared=shared,
            balance=LoadBalance(weight=balance, scope=balance_scope) if balance else None,
            z_loss=z_loss,
        )

    edited = edit_layers(cfg, where, edit)
    if not changed:
        raise ax.ConfigError(f"every={every} exceeds the number of selected feed-forward blocks, so none would change")
    if isinstance(edited, Trainer.Config):
        edited = edited.set(callbacks={**edited.callbacks, "dead_experts": DeadExpertWarning.Config()})
    return edited


def _router(
    num_experts: int,
    top_k: int,
    expert_choice: bool,
    jitter: float,
    score: Literal["softmax", "sigmoid"],
    normalize: bool,
    scale: float,
    groups: int,
    top_groups: int,
    bias_rate: float | None,
) -> Router.Config:
    if top_k > num_experts:
        raise ax.ConfigError(f"top_k={top_k} is more than num_experts={num_experts}")
    if expert_choice:
        if (score, normalize, scale, groups, top_groups, bias_rate) != ("softmax", True, 1.0, 1, 1, None):
            raise ax.ConfigError(
                "score, normalize, scale, groups, top_groups and bias_rate have no effect with expert_choice: they "
                "control how tokens choose experts"
            )
        return ExpertChoice.Config(capacity_factor=float(top_k), jitter=jitter)
    return TopK.Config(
        top_k=top_k,
        score=score,
        normalize=normalize,
        scale=scale,
        groups=groups,
        top_groups=top_groups,
        jitter=jitter,
        bias_rate=bias_rate,
    )
