"""Checkpoints: exact restores onto any devices, and helpful errors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.train import Checkpointer

from .checkpoint_states import abstract, assert_same_bits, make_state, names, run_python, save


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpointer(folder):
    with Checkpointer.Config(keep=2).build(folder) as built:
        yield built


def test_a_restored_state_is_equal_bit_for_bit(checkpointer, capfd):
    state = make_state(7)
    data = {"streams": {"0": {"next_index": 5}}, "text": "\0ü"}
    checkpointer.save(7, state, data=data, meta={"config": "a: 1\n", "loss": 0.1 + 0.2})
    checkpointer.wait()
    restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.data) == (7, data)
    assert restored.meta == {"config": "a: 1\n", "loss": 0.1 + 0.2}
    assert_same_bits(restored.state, state)
    assert type(restored.state["optimizer"][1][0]) is optax.ScaleByAdamState
    assert capfd.readouterr() == ("", "")


def test_any_name_can_be_a_key(checkpointer):
    odd = ("", " ", ".", "..", "a/b", "a", "/", ".zarray", "%2f", "ü{}:*", "x" * 300)
    state = {name: jnp.full(2, number) for number, name in enumerate(odd)}
    checkpointer.save(1, {"params": state}, data=None, meta={})
    assert_same_bits(checkpointer.restore(abstract({"params": state})).state["params"], state)


def test_empty_arrays_and_an_empty_state_are_restored(checkpointer):
    for step, state in enumerate(({"a": jnp.zeros((0, 3), jnp.bfloat16)}, {})):
        checkpointer.save(step, state, data=None, meta={})
        assert_same_bits(checkpointer.restore(abstract(state)).state, state)


def test_a_part_of_the_state_can_be_restored(checkpointer):
    save(checkpointer, 3)
    wanted = {"params": {"layer": abstract(make_state(3))["params"]["layer"]}}
    restored = checkpointer.restore(wanted, subset=True)
    assert_same_bits(restored.state, {"params": {"layer": make_state(3)["params"]["layer"]}})


def test_meta_and_layout_do_not_read_arrays(checkpointer, folder):
    save(checkpointer, 3)
    checkpointer.wait()
    for path in (folder / "3/state").rglob("*"):
        if path.is_file():
            path.unlink()
    assert checkpointer.meta() == checkpointer.meta(3) == {"lr": 0.1}
    layout = checkpointer.layout()
    assert layout["params.layer.kernel"] == ["float32", [1000, 8]] and layout["keys.many"] == ["key<rbg>", [3]]
    assert layout["params.blocks.1"] == ["float32", [0, 4]]


def test_state_may_be_donated_right_after_save(folder):
    bump = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    probe = jnp.ones(1 << 20)
    bump(probe)
    assert probe.is_deleted()  # donation works here
    with Checkpointer.Config(keep=9).build(folder) as checkpointer:
        for step in range(1, 4):
            rng = np.random.default_rng(step)
            expected = {f"w{i}": rng.standard_normal(1 << 19).astype(np.float32) for i in range(6)}
            state = jax.tree.map(jnp.array, expected)
            save(checkpointer, step, state)
            for _ in range(3):
                state = bump(state)
            jax.block_until_ready(state)
            checkpointer.wait()
            assert_same_bits(checkpointer.restore(abstract(expected), step).state, expected)


def test_the_newest_and_every_nth_checkpoint_are_kept(folder):
    with Checkpointer.Config(keep=2, keep_every=4).build(folder) as checkpointer:
        for step in range(1, 8):
            save(checkpointer, step, {"a": jnp.ones(2)})
    with Checkpointer.Config(keep=2, keep_every=4).build(folder) as checkpointer:  # as after a restart
        assert checkpointer.steps() == [4, 6, 7]
        for step in range(8, 11):
            save(checkpointer, step, {"a": jnp.ones(2)})
        checkpointer.wait()
        assert checkpointer.steps() == [4, 8, 9, 10]
        assert names(folder) == ["10", "4", "8", "9"]


def test_a_step_is_not_written_twice(checkpointer):
    save(checkpointer, 4)
    for step in (3, 4):
        with pytest.raises(AxcoreError, match=rf"cannot save step {step}: .* has checkpoints of steps 4"):
            save(checkpointer, step)


def test_leftovers_of_an_interrupted_run_do_not_count_and_are_cleared(checkpointer, folder):
    (folder / "5.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (folder / "removed" / "3").mkdir(parents=True)
    assert checkpointer.latest() is None
    with pytest.raises(AxcoreError, match="no checkpoint in"):
        checkpointer.restore(abstract(make_state(1)))
    assert len(names(folder)) == 2  # reading must not delete the files of a run that is saving
    save(checkpointer, 5)
    checkpointer.wait()
    assert names(folder) == ["5"]


MESH = """
    import pathlib, sys
    import axcore.train
    assert "orbax.checkpoint" not in sys.modules  # importing it takes long
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    kernel, keys = NamedSharding(mesh, P("a", "b")), NamedSharding(mesh, P("b"))
    with axcore.train.Checkpointer.Config().build(pathlib.Path(sys.argv[1])) as checkpointer:
        wanted = {
            "kernel": jax.ShapeDtypeStruct((16, 6), "float32", sharding=kernel),
            "keys": jax.ShapeDtypeStruct((4,), jax.random.key(0).dtype, sharding=keys),
        }
        state = checkpointer.restore(wanted).state
        assert state["kernel"].sharding == kernel and state["keys"].sharding == keys
        assert state["kernel"].addressable_shards[0].data.shape == (4, 3)
        assert (np.asarray(state["kernel"]) == np.arange(96).reshape(16, 6)).all()
        checkpointer.save(2, state, data=None, meta={})
        bad = jax.ShapeDtypeStruct((16, 6), "float32", sharding=NamedSharding(mesh, P("b", "a")))
        try:
            checkpointer.restore({**wanted, "kernel": bad})
        except axcore.config.AxcoreError as error:
            print(error)
"""


@pytest.mark.long
def test_restores_onto_another_mesh_and_back(checkpointer, folder):
    state = {"kernel": jnp.arange(96, dtype=jnp.float32).reshape(16, 6), "keys": jax.random.split(jax.random.key(5), 4)}
    checkpointer.save(1, state, data=None, meta={})
    checkpointer.wait()
    first, second = run_python(MESH, folder, devices=8).splitlines()  # and nothing on stderr
    assert first.endswith("does not fit this state:") and second.startswith("  kernel: ")
    restored = checkpointer.restore(abstract(state), 2)
    assert_same_bits(restored.state, state)
    assert len(restored.state["kernel"].devices()) == 1


def test_float_dtypes_are_cast_only_on_request(checkpointer):
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(1000), jnp.float32)
    checkpointer.save(1, {"weight": weight, "count": jnp.arange(3)}, data=None, meta={})
    half = {"weight": jax.ShapeDtypeStruct((1000,), jnp.bfloat16), "count": jax.ShapeDtypeStruct((3,), jnp.int32)}
    with pytest.raises(AxcoreError, match=r"weight: the checkpoint has float32\[1000\], expected bfloat16\[1000\]"):
        checkpointer.restore(half)
    assert_same_bits(checkpointer.restore(half, cast=True).state["weight"], weight.astype(jnp.bfloat16))
    for path, dtype in (("weight", jnp.int8), ("count", jnp.float32), ("count", jnp.int8)):
        wanted = {**half, path: jax.ShapeDtypeStruct(half[path].shape, dtype)}
        with pytest.raises(AxcoreError, match=rf"{path}: the checkpoint has .*, expected {jnp.dtype(dtype)}\["):
            checkpointer.restore(wanted, cast=True)


def test_all_mismatches_of_a_state_are_in_one_error(checkpointer):
    save(checkpointer, 1)
    wanted = abstract(make_state(1))
    wanted["params"]["layer"]["kernel"] = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    wanted["params"]["scale"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    wanted["extra"] = wanted.pop("step")
    wanted["keys"]["one"] = jax.ShapeDtypeStruct((), jax.random.key(0, impl="rbg").dtype)
    with pytest.raises(AxcoreError) as caught:
        checkpointer.restore(wanted)
    message = str(caught.value)
    assert "params.layer.kernel: the checkpoint has float32[1000, 8], expected float32[5, 8]" in message
    assert "params.scale: the checkpoint has float8_e4m3fn[4], expected float32[4]" in message
    assert "keys.one: the checkpoint has key<fry>[], expected key<rbg>[]" in message
    assert "extra: not in the checkpoint" in message and "step: only in the checkpoint" in message
    assert len(message.splitlines()) == 6


def test_unsupported_leaves_are_named(checkpointer):
    with pytest.raises(AxcoreError, match=r"a\.b of the state is a str"):
        save(checkpointer, 1, {"a": {"b": "text"}})
    with pytest.raises(AxcoreError, match=r"have the path 'a\.b'"):
        save(checkpointer, 1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    with pytest.raises(AxcoreError, match=r"metadata .* is not JSON"):
        checkpointer.save(1, {"a": jnp.ones(1)}, data=None, meta={"x": object()})


def test_an_unknown_step_lists_the_known_ones(checkpointer):
    save(checkpointer, 4)
    checkpointer.wait()
    with pytest.raises(AxcoreError, match=r"no checkpoint of step 5 in .*\. It has steps 4\."):
        checkpointer.meta(5)


def test_gs_addresses_are_kept_and_s3_addresses_raise():
    assert str(Checkpointer.Config().build("gs://bucket/run").folder) == "gs://bucket/run"
    with pytest.raises(ConfigError, match=r"cannot keep checkpoints in s3://bucket/run, .* Give a gs:// path"):
        Checkpointer.Config().build("s3://bucket/run")


UNCHANGED = """
    import logging, resource, selectors, sys, time, warnings
    import jax.numpy as jnp, numpy as np
    from axcore.config import AxcoreError
    from axcore.train import Checkpointer

    def process():
        absl = logging.getLogger("absl")
        log = (absl.level, absl.propagate, *map(list, (absl.filters, absl.handlers, logging.root.handlers)))
        asyncio = list(logging.getLogger("asyncio").filters)
        return log, asyncio, list(warnings.filters), sys.unraisablehook, sys.excepthook, sys.stdout, sys.stderr

    select = selectors.DefaultSelector.select

    def late(selector, timeout=None):  # so that several writes fail in one turn of Orbax's event loop
        time.sleep(0.02)
        return select(selector, timeout)

    before, state = process(), {str(i): jnp.arange(1 << 16) for i in range(64)}
    with Checkpointer.Config().build(sys.argv[1]) as checkpointer:
        checkpointer.save(1, state, data=None, meta={})
        logging.getLogger("mine").warning("still here")
        checkpointer.wait()
        checkpointer.restore(state)
        assert process() == before
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 12, limits[1]))
        selectors.DefaultSelector.select = late
        try:
            checkpointer.save(2, state, data=None, meta={})
            checkpointer.wait()
        except AxcoreError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert process() == before
"""


@pytest.mark.slow
def test_case_saving_does_not_change_logging_warnings_or_hooks(folder):
    out = run_python(UNCHANGED, folder, stderr="still here\n")
    assert out == f"cannot write checkpoint {folder / '2'}: File too large\n"


def test_a_record_is_plain_json(checkpointer, folder):
    save(checkpointer, 4)
    checkpointer.wait()
    record = json.loads((folder / "4/record/metadata").read_text())
    assert (record["step"], record["meta"], record["data"]) == (4, {"lr": 0.1}, {"position": 4})
