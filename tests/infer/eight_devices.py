"""An engine on several CPU devices and on one; `axcore.testing.devices.on_devices` runs `main`."""

SHAPES = {
    "tensor": {"tensor": 2},
    "tensor, more devices than kv heads": {"tensor": 4},
    "more devices than rows": {"fsdp": 8},
    "expert": {"expert": 4},
    "data, tensor": {"data": 2, "tensor": 2},
    "fsdp, expert, tensor": {"fsdp": 2, "expert": 2, "tensor": 2},
}
MAX_LEN, ROWS, PAGES = 16, 4, 20


def main(shape, is_paged, is_mixture):
    """On one device and on a mesh: what a few requests sampled, the programs compiled after the warm-up, and the bytes
    of the state on each device and in total."""
    import math

    import jax
    import numpy as np

    import axcore as ax
    from axcore.infer import Engine, Request, SamplingOptions
    from axcore.nn import ContiguousCache
    from axcore.parallel import Mesh
    from axcore.testing.models import VOCAB_SIZE, tiny_model
    from axcore_paged_kv.cache import PagedCache

    cfg = ax.pipe(ax.select(tiny_model(), "embedding").set(init=ax.nn.Normal(stddev=1.0)), ax.use("rope"))
    if is_mixture:
        cfg = ax.pipe(cfg, ax.use("moe", num_experts=4, top_k=2))
    model = cfg.build(rngs=ax.Rngs(0))
    cache = PagedCache.Config(page_size=4, num_pages=PAGES) if is_paged else ContiguousCache.Config()
    engine = Engine.Config(max_len=MAX_LEN, max_rows=ROWS, step_tokens=MAX_LEN, cache=cache)
    random = np.random.default_rng(0)
    options = (
        SamplingOptions(temperature=0.0, max_tokens=6, logprobs=2),
        SamplingOptions(seed=4, top_p=0.8, presence_penalty=0.5, max_tokens=6, logprobs=1),
    )
    asked = [
        Request(tuple(random.integers(0, VOCAB_SIZE, length).tolist()), options[number % 2])
        for number, length in enumerate((1, 4, 5, 9, 10))
    ]
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda name, *_, **__: compiled.append(name) if name.endswith("backend_compile_duration") else None
    )

    def run(layout):
        with engine.build(model, layout=layout) as running:
            running.warm_up(("greedy", "full"))
            traced = running.stats.compiled
            assert compiled
            compiled.clear()
            found = running.generate(asked)
            late = running.stats.compiled - traced, len(compiled)
            caches = {
                jax.tree_util.keystr(path, simple=True, separator="."): leaf
                for path, leaf in jax.tree.leaves_with_path(running._core.programs.state)
                if "cache" in jax.tree_util.keystr(path)
            }
            held = {path: (leaf.addressable_shards[0].data.nbytes, leaf.nbytes) for path, leaf in caches.items()}
        logprobs = [each.logprob for piece in found for each in piece.logprobs]
        return {"ids": [piece.ids for piece in found], "logprobs": logprobs, "late": late, "held": held}

    count = math.prod(SHAPES[shape].values())
    return run(None), run(Mesh(shape=SHAPES[shape]).make(jax.devices()[:count]))
