"""Meshes, remat and microbatches that fit the memory of the devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from axcore.config import has_field, walk
from axcore.nn import use_remat, use_unroll
from axcore.parallel import ByTag, Remat
from axcore.plugin import Accelerator
from axcore.train import Trainer
from axcore_mesh_rules.sizes import ALL_VALUES_FACTOR, Sizes

STATE_COPIES, NUM_MOMENTS = 5, 2
"""Number of arrays of the size of the parameters: parameters, two moments of AdamW, gradients, and gradients summed
over microbatches; and how many of them are moments."""
MEMORY_FRACTION, STATE_FRACTION = 0.85, 0.5
"""The fraction of memory to use, and the fraction that the state may take before it is sharded over more hosts."""
MIN_TOKENS = 8192
"""Smallest desirable number of tokens of a microbatch on one device. With 8192 instead of 16,384, Llama2-7B is 7%
slower on two H200s with FSDP."""
TAGS = ("query", "key", "value", "heads", "lse", "gate", "up")


class Policy(NamedTuple):
    """A remat policy, and whether scanned layers are unrolled. Policies that keep more values run faster."""

    remat: Remat | None
    unroll: bool = False

    def kept(self, sizes: Sizes) -> float:
        """Number of features per token that are kept for the backward pass."""
        inputs = sizes.layers * sizes.dim
        match self.remat:
            case None:
                return ALL_VALUES_FACTOR * (sizes.tagged + inputs)
            case ByTag(save=save) if save == TAGS:
                return sizes.tagged + inputs
            case ByTag():
                return 2 * inputs
        return inputs


UNROLLED = Policy(None, unroll=True)
"""Without remat, a scan keeps twice the values that unrolled layers keep (Llama 1.1B on one H200: 97 and 44 GiB). A
scan that keeps all products is 14% slower there than unrolled layers, which compile in 15 to 20 s, not in 5 to 10 s."""
SCANNED = (Policy(ByTag(save=TAGS)), Policy(ByTag(save=("heads", "lse"))), Policy(Remat()))


def hybrid_sharding(cfg: Trainer.Config, accelerator: Accelerator, groups: int = 1) -> Trainer.Config:
    """Shards over the devices of a host (or of a TPU slice) and replicates over hosts.

    Parameters are gathered only over the fast interconnect, and only gradients cross the slower network.

    Args:
        groups: the number of hosts over which the parameters are sharded.
    """
    shape = {"data": accelerator.hosts // groups, "fsdp": accelerator.per_host * groups}
    return cfg.set(mesh=cfg.mesh.set(shape=shape))


def fitted(
    cfg: Trainer.Config, accelerator: Accelerator, sizes: Sizes | None, memory: float, policies: Sequence[Policy]
) -> Trainer.Config:
    """`hybrid_sharding` over as many hosts as the state requires, with the fastest remat policy whose microbatches fit.

    If nothing fits, the config gets the layout that needs the least memory.

    Args:
        memory: bytes that a program may use on one device.
        policies: the policies to choose from, the fastest first.
    """
    if sizes is None:
        return hybrid_sharding(cfg, accelerator)
    state = STATE_COPIES * sizes.parameters
    host = STATE_FRACTION * memory * accelerator.per_host
    groups = next((count for count in _divisors(accelerator.hosts) if state <= host * count), accelerator.hosts)
    devices = groups * accelerator.per_host
    cfg = hybrid_sharding(cfg, accelerator, groups)
    if state > MEMORY_FRACTION * memory * devices:
        state -= NUM_MOMENTS * sizes.parameters
        cfg = cfg.set(mesh=cfg.mesh.set(optimizer_memory="host"))
    if sizes.rows % accelerator.count or not any(has_field(node, "remat") for _, node in walk(cfg.model)):
        return cfg
    free = MEMORY_FRACTION * memory - state / devices - sizes.gathered
    policy, microbatches = _fastest(sizes, sizes.rows // accelerator.count, free, policies)
    cfg = cfg.set(model=use_remat(cfg.model, policy.remat), microbatches=microbatches)
    return cfg.set(model=use_unroll(cfg.model, True)) if policy.unroll else cfg


def _fastest(sizes: Sizes, rows: int, free: float, policies: Sequence[Policy]) -> tuple[Policy, int]:
    """The first policy whose largest microbatch has at least `MIN_TOKENS`, and the number of microbatches. If there is
    no such policy, the one with the largest microbatch."""
    found = [(policy, count) for policy in policies if (count := _microbatches(sizes, rows, free, policy)) is not None]
    for policy, count in found:
        if count == 1 or rows // count * sizes.seq_len >= MIN_TOKENS:
            return policy, count
    return min(found, key=lambda each: each[1], default=(policies[-1], rows))


def _microbatches(sizes: Sizes, rows: int, free: float, policy: Policy) -> int | None:
    """The smallest number of microbatches that fit, for `rows` rows on one device; None if none fits."""
    fits = (count for count in _divisors(rows) if sizes.activations(rows // count, policy.kept(sizes)) <= free)
    return next(fits, None)


def _divisors(number: int) -> Iterator[int]:
    return (count for count in range(1, number + 1) if number % count == 0)
