"""The time to the first token of prompts that share a prefix, in a hybrid of attention and Mamba-2, with and without
saved states. The two engines alternate in one process, with greedy requests one at a time.

    python benchmarks/prefix_states.py --shared 1024 --own 64
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore_paged_kv.cache import PagedCache

FIRST = SamplingOptions(temperature=0.0, max_tokens=1, ignore_eos=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"shared": 1024, "own": 64, "dim": 128, "layers": 4, "prompts": 40}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    mamba = ax.use("mamba2", state_dim=16, head_dim=32, attention_every=2)
    cfg = mamba(ax.select(ax.recipe("quickstart"), "model.decoder").set(num_layers=given.layers))
    model = cfg.model.build(rngs=ax.Rngs(0))
    length = given.shared + given.own
    fields = {"max_len": length + 16, "max_rows": 2, "step_tokens": 512, "cache": PagedCache.Config(page_size=16)}
    engines = {states: Engine.Config(**fields, prefix_states=states).build(model) for states in (0, 8)}
    random = np.random.default_rng(0)
    vocab = engines[0].vocab_size
    shared = random.integers(0, vocab, given.shared).tolist()
    related = [(*shared, *random.integers(0, vocab, given.own).tolist()) for _ in range(given.prompts + 2)]
    others = [tuple(random.integers(0, vocab, length).tolist()) for _ in range(given.prompts)]
    for engine in engines.values():
        engine.warm_up(methods=("greedy",))
        for ids in related[:2]:  # the second saves the state after the shared pages
            seconds(engine, ids)
    for name, prompts in {"shared prefix": related[2:], "nothing shared": others}.items():
        times = {states: [] for states in engines}
        for ids in prompts:
            for states, engine in engines.items():
                times[states].append(seconds(engine, ids))
        ratio = statistics.median(now / before for before, now in zip(times[0], times[8], strict=True))
        medians = [f"{statistics.median(times[states]) * 1e3:.1f} ms" for states in engines]
        print(f"{name}: {medians[0]} without, {medians[1]} with saved states, ratio {ratio:.2f}")
    for engine in engines.values():
        print(engine.stats)
        engine.close()


def seconds(engine: Engine, ids: tuple[int, ...]) -> float:
    began = time.perf_counter()
    engine.generate([Request(ids, FIRST)])
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
