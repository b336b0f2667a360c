"""Strategies of parallelism by name."""

import pytest

import axcore as ax
from axcore.infer import Decoder
from axcore.parallel.pipeline import GPipe, OneForwardOneBackward
from axcore.testing.models import tiny_model
from axcore.train import Trainer
from axcore.train.step.program import program

DEFAULT = {"data": -1, "fsdp": 1}
HOST = {"data": 4, "fsdp": 8}


def mesh_of(shape, *modifiers):
    return ax.pipe(Trainer.Config(model=tiny_model(), steps=1, mesh=ax.Mesh(shape=shape)), *modifiers).mesh


@pytest.mark.parametrize(
    ("before", "modifiers", "after"),
    [
        (DEFAULT, [ax.use("fsdp")], {"data": 1, "fsdp": -1}),
        (DEFAULT, [ax.use("fsdp"), ax.use("data", size=2)], {"data": 2, "fsdp": -1}),
        (DEFAULT, [ax.use("tensor", size=4)], {"data": -1, "fsdp": 1, "tensor": 4}),
        (HOST, [ax.use("tensor", size=4)], {"data": 4, "fsdp": 2, "tensor": 4}),
        (HOST, [ax.use("tensor", size=4), ax.use("tensor", size=2)], {"data": 4, "fsdp": 4, "tensor": 2}),
        (HOST, [ax.use("tensor", size=2), ax.use("expert", size=4)], {"data": 4, "fsdp": 1, "tensor": 2, "expert": 4}),
        (HOST, [ax.use("fsdp", size=32)], {"data": -1, "fsdp": 32}),
        (HOST, [ax.use("fsdp", size=4), ax.use("tensor", size=2)], {"data": -1, "fsdp": 4, "tensor": 2}),
        (HOST, [ax.use("data", size=2), ax.use("tensor", size=2)], {"data": 2, "fsdp": -1, "tensor": 2}),
        ({"data": 8}, [ax.use("context", size=2)], {"data": 4, "context": 2}),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_an_axis_takes_its_devices_from_the_free_axis_or_from_fsdp_or_data(before, modifiers, after):
    assert dict(mesh_of(before, *modifiers).shape) == after


def test_an_axis_raises_if_no_other_axis_can_give_it_devices():
    with pytest.raises(ax.ConfigError, match=r"'tensor' of size 3 takes its devices .* \(fsdp=8, data=4\)"):
        mesh_of(HOST, ax.use("tensor", size=3))


def test_tensor_parallelism_shards_the_sequence_only_if_asked():
    assert mesh_of(DEFAULT, ax.use("tensor", size=2)).rules["seq"] == "context"
    sequence = ax.use("tensor", size=2, sequence=True)
    assert mesh_of(DEFAULT, sequence).rules["seq"] == ("context", "tensor")
    assert mesh_of(DEFAULT, sequence, ax.use("tensor", size=2)).rules["seq"] == "context"


def test_a_pipeline_has_a_schedule_with_chunks():
    mesh = mesh_of(DEFAULT, ax.use("pipeline", size=4, chunks=2))
    assert dict(mesh.shape) == {"data": -1, "fsdp": 1, "pipeline": 4}
    assert mesh.pipeline == OneForwardOneBackward.Config(chunks=2)
    assert mesh_of(DEFAULT, ax.use("pipeline", size=4, schedule="gpipe")).pipeline == GPipe.Config()


def test_zero_and_offload_are_fields_of_the_mesh():
    mesh = mesh_of(DEFAULT, ax.use("zero", stage=2), ax.use("optimizer-offload"))
    assert (mesh.zero, mesh.optimizer_memory) == (2, "host")


def test_a_config_without_a_mesh_raises():
    with pytest.raises(ax.ConfigError, match="only the config of a trainer has a mesh"):
        ax.pipe(tiny_model(), ax.use("tensor", size=2))


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size", "nearest"), [(4, 2, 8, "4"), (4, 4, 8, "4"), (6, 2, 4, "3 or 6"), (1, 1, 2, "1")]
)
def test_heads_that_tensor_parallelism_would_split_are_refused(heads, kv_heads, size, nearest):
    """Every weight is divisible, and so would be split inside a head."""
    cfg = of_heads(heads, kv_heads, size)
    message = (
        rf"^model\.decoder\.layers(\.0)?\.attention: num_heads={heads} is not a multiple of {size}, the number of "
        rf"devices that share the heads \(tensor={size}\)\. Possible numbers of devices: {nearest}\. Change mesh"
    )
    with pytest.raises(ax.ConfigError, match=message):
        made(cfg)
    with pytest.raises(ax.ConfigError, match=message):
        cache = ax.nn.ContiguousCache.Config()
        Decoder.abstract(cfg.model, cache=cache, batch_size=8, max_len=8, layout=cfg.mesh.abstract(8, "cpu"))
    rules = {name: axes for name, axes in cfg.mesh.rules.items() if name not in ("head", "kv_head")}
    made(cfg.set(mesh=cfg.mesh.set(rules=rules)))


def test_fewer_kv_heads_than_tensor_shards_are_replicated():
    made(of_heads(8, 2, 8))


def of_heads(heads, kv_heads, size):
    model = ax.select(tiny_model(), "decoder.layers.attention").set(num_heads=heads, num_kv_heads=kv_heads, head_dim=16)
    cfg = Trainer.Config(model=model, mesh=ax.Mesh(shape={"data": 1, "fsdp": 8}))
    return ax.pipe(cfg, ax.use("tensor", size=size))


def made(cfg):
    return program(cfg.model, cfg.learner, cfg.mesh.abstract(8, "cpu"), cfg.objective)
