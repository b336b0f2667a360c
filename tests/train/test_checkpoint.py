"""Checkpoints: exact bits, all or nothing, and errors that say what to do."""

import contextlib
import json
import os
import pathlib
import resource
import subprocess
import sys
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.train.checkpoint import folder as checkpoint_folder
from axcore.train.checkpoint.manager import Checkpointer
from axcore.train.checkpoint.save_policy import SavePolicy


def make_state(seed: int, size: int = 1000):
    """Every kind of leaf and container that a training state has."""
    rng = np.random.default_rng(seed)
    params = {
        "layer": {"kernel": jnp.asarray(rng.standard_normal((size, 8)), jnp.float32)},
        "blocks": [jnp.asarray(rng.standard_normal(3), jnp.bfloat16), jnp.zeros((0, 4))],
        "scale": jnp.asarray(rng.standard_normal(4), jnp.float8_e4m3fn),
    }
    keys = {"one": jax.random.key(seed), "many": jax.random.split(jax.random.key(seed, impl="rbg"), 3)}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)).init(params["layer"])
    return {"params": params, "keys": keys, "optimizer": optimizer, "step": jnp.int32(seed)}


def abstract(state):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)


def assert_same_bits(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    for a, b in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save(checkpointer, step, state=None):
    checkpointer.save(step, make_state(step) if state is None else state, data=b"\0pos", meta={"lr": 0.1})


def names(folder: pathlib.Path):
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpointer(folder):
    with Checkpointer.Config(keep=2).build(folder) as built:
        yield built


def run_python(code: str, *arguments: object, devices: int = 1) -> str:
    env = {
        **os.environ,
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
    }
    env["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    return done.stdout


def test_everything_comes_back_bit_for_bit(checkpointer, capfd):
    state = make_state(7)
    checkpointer.save(7, state, data=bytes(range(256)), meta={"config": "a: 1\n", "loss": 0.1 + 0.2})
    checkpointer.wait()
    restored = checkpointer.restore(abstract(state))
    assert (restored.step, restored.data) == (7, bytes(range(256)))
    assert restored.meta == {"config": "a: 1\n", "loss": 0.1 + 0.2}
    assert_same_bits(restored.state, state)
    assert type(restored.state["optimizer"][1][0]) is optax.ScaleByAdamState
    assert capfd.readouterr() == ("", "")


def test_a_part_of_the_state_can_be_restored(checkpointer):
    save(checkpointer, 3)
    wanted = {"params": {"layer": abstract(make_state(3))["params"]["layer"]}}
    restored = checkpointer.restore(wanted, subset=True)
    assert_same_bits(restored.state, {"params": {"layer": make_state(3)["params"]["layer"]}})


def test_meta_needs_no_array(checkpointer, folder):
    save(checkpointer, 3)
    checkpointer.wait()
    for path in (folder / "3/state").rglob("*"):
        if path.is_file():
            path.unlink()
    assert checkpointer.meta() == checkpointer.meta(3) == {"lr": 0.1}


def test_state_may_be_donated_right_after_save(folder):
    bump = jax.jit(lambda state: jax.tree.map(lambda x: x * 0 - 1, state), donate_argnums=0)
    probe = jnp.ones(1 << 20)
    bump(probe)
    assert probe.is_deleted()  # otherwise this test says nothing
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


def test_old_checkpoints_go_only_after_the_new_one_is_there(checkpointer, folder, monkeypatch):
    seen = []
    remove = checkpoint_folder.remove

    def watched(folder, step):
        seen.append((step, checkpoint_folder.steps(folder)))
        remove(folder, step)

    monkeypatch.setattr(checkpoint_folder, "remove", watched)
    for step in (1, 5, 9, 12):
        save(checkpointer, step)
    checkpointer.wait()
    assert seen == [(1, [1, 5, 9]), (5, [5, 9, 12])]
    assert checkpointer.steps() == [9, 12]
    assert names(folder) == ["12", "9"]


def test_rewind_removes_what_comes_after(checkpointer, folder):
    for step in (4, 8):
        save(checkpointer, step)
    checkpointer.rewind(4)
    assert names(folder) == ["4"]
    save(checkpointer, 8)  # the run comes there again
    checkpointer.wait()
    assert checkpointer.latest() == 8


def test_the_same_step_is_not_written_twice(checkpointer, folder):
    save(checkpointer, 4)
    save(checkpointer, 4)  # the last step of a run that was also due
    with Checkpointer.Config().build(folder) as other:
        for step in (3, 4):
            with pytest.raises(AxcoreError, match=rf"cannot save step {step}: .* has checkpoints of 4"):
                save(other, step)


def test_leftovers_of_an_interrupted_run_do_not_count_and_are_cleared(checkpointer, folder):
    (folder / "5.tmp" / "state").mkdir(parents=True)
    (folder / "removing-3").mkdir()
    assert checkpointer.latest() is None
    with pytest.raises(AxcoreError, match="no checkpoint in"):
        checkpointer.restore(abstract(make_state(1)))
    assert len(names(folder)) == 2  # a reader beside a run that saves must leave its files alone
    save(checkpointer, 5)
    checkpointer.wait()
    assert names(folder) == ["5"]


KILL = """
    import os, pathlib, random, signal, sys, time, warnings
    import jax, numpy as np
    import orbax.checkpoint
    from axcore.train.checkpoint.manager import Checkpointer
    warnings.simplefilter("ignore")  # os.fork: no jax backend runs yet
    folder, rounds = pathlib.Path(sys.argv[1]), int(sys.argv[2])

    def state(step):
        rng = np.random.default_rng(step)
        return {f"w{i}": rng.standard_normal(1 << 18).astype(np.float32) for i in range(4)}

    def fork(function, *arguments):
        pid = os.fork()
        if pid == 0:
            try:
                function(*arguments)
            except BaseException as error:
                print(repr(error), file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        return pid

    def check(checkpointer):
        assert len(checkpointer.steps()) <= 3, checkpointer.steps()
        for step in checkpointer.steps():
            expected = state(step)
            wanted = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in expected.items()}
            restored = checkpointer.restore(wanted, step)
            assert (restored.data, restored.meta) == (b"%d" % step, {"s": step})
            assert all((np.asarray(restored.state[name]) == x).all() for name, x in expected.items())

    def resume(ready):
        checkpointer = Checkpointer.Config(keep=2).build(folder)
        check(checkpointer)
        step = checkpointer.latest() or 0
        while True:
            step += 1
            arrays = jax.tree.map(jax.numpy.asarray, state(step))
            checkpointer.save(step, arrays, data=b"%d" % step, meta={"s": step})
            os.write(ready, b".")

    interrupted = committed = 0
    random.seed(1)
    for _ in range(rounds):
        reader, ready = os.pipe()
        child = fork(resume, ready)
        os.close(ready)
        assert os.read(reader, 1), "it died by itself"
        time.sleep(random.uniform(0, 0.6))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        interrupted += any("tmp" in path.name or "removing" in path.name for path in folder.iterdir())
        committed += any(path.name.isdecimal() for path in folder.iterdir())
    assert os.waitpid(fork(lambda: check(Checkpointer.Config().build(folder))), 0)[1] == 0
    print(interrupted, committed)
"""


def test_sigkill_at_any_moment_leaves_whole_checkpoints(folder):
    interrupted, committed = map(int, run_python(KILL, folder, 8).split())
    assert interrupted >= 1 and committed >= 4  # the kills did fall into saves, and saves did happen


MESH = """
    import pathlib, resource, sys
    import axcore.train.checkpoint.manager
    assert "orbax" not in sys.modules  # importing it takes a second
    import jax, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P

    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    kernel = NamedSharding(mesh, P("a", "b"))
    keys = NamedSharding(mesh, P())
    with axcore.train.checkpoint.manager.Checkpointer.Config().build(pathlib.Path(sys.argv[1])) as checkpointer:
        wanted = {
            "kernel": jax.ShapeDtypeStruct((16, 6), "float32", sharding=kernel),
            "key": jax.ShapeDtypeStruct((), jax.random.key(0).dtype, sharding=keys),
        }
        state = checkpointer.restore(wanted).state
        assert state["kernel"].sharding == kernel and state["key"].sharding == keys
        assert state["kernel"].addressable_shards[0].data.shape == (4, 3)
        assert (np.asarray(state["kernel"]) == np.arange(96).reshape(16, 6)).all()
        checkpointer.save(2, state, data=b"", meta={})
        bad = jax.ShapeDtypeStruct((16, 6), "float32", sharding=NamedSharding(mesh, P("b", "a")))
        try:
            checkpointer.restore({**wanted, "kernel": bad})
        except axcore.config.AxcoreError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, -1))
        try:
            big = np.random.default_rng(0).random(1 << 17)
            checkpointer.save(3, {str(i): big + i for i in range(8)}, data=b"", meta={})
            checkpointer.wait()
        except axcore.config.AxcoreError as error:
            print(error)
"""


def test_restores_onto_another_mesh_and_back(checkpointer, folder):
    state = {"kernel": jnp.arange(96, dtype=jnp.float32).reshape(16, 6), "key": jax.random.key(5)}
    checkpointer.save(1, state, data=b"", meta={})
    checkpointer.wait()
    first, second, third = run_python(MESH, folder, devices=8).splitlines()  # and nothing on stderr
    assert first.endswith("does not fit this state:") and second.startswith("  kernel: ")
    assert third == f"cannot write checkpoint {folder / '3'}: File too large"
    restored = checkpointer.restore(abstract(state), 2)
    assert_same_bits(restored.state, state)
    assert len(restored.state["kernel"].devices()) == 1


def test_a_state_that_does_not_fit_is_one_error_with_all_paths(checkpointer):
    save(checkpointer, 1)
    wanted = abstract(make_state(1))
    wanted["params"]["layer"]["kernel"] = jax.ShapeDtypeStruct((5, 8), jnp.float32)
    wanted["params"]["scale"] = jax.ShapeDtypeStruct((4,), jnp.float32)
    wanted["extra"] = wanted.pop("step")
    with pytest.raises(AxcoreError) as caught:
        checkpointer.restore(wanted)
    message = str(caught.value)
    assert "params.layer.kernel: the checkpoint has float32[1000, 8], expected float32[5, 8]" in message
    assert "params.scale: the checkpoint has float8_e4m3fn[4], expected float32[4]" in message
    assert "extra: not in the checkpoint" in message and "step: only in the checkpoint" in message
    assert len(message.splitlines()) == 5


@pytest.mark.parametrize("how", ["truncated", "one byte changed", "gone"])
@pytest.mark.parametrize("which", ["arrays", "record"])
def test_damage_is_named_with_the_step_to_resume_from(checkpointer, folder, capfd, which, how):
    for step in (1, 2):
        save(checkpointer, step)
    checkpointer.wait()
    files = [path for path in (folder / "2").rglob("*") if path.is_file()]
    victim = max(files, key=lambda path: path.stat().st_size) if which == "arrays" else folder / "2/record.json"
    content = bytearray(victim.read_bytes())
    if how == "gone":
        victim.unlink()
    elif how == "truncated":
        victim.write_bytes(content[: len(content) // 2])
    else:
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    with pytest.raises(AxcoreError, match=r"checkpoints/2 is damaged.*resume from step 1") as caught:
        checkpointer.restore(abstract(make_state(2)))
    assert "\n" not in str(caught.value)
    assert checkpointer.restore(abstract(make_state(1)), 1).step == 1
    assert capfd.readouterr() == ("", "")


def test_a_damaged_only_checkpoint_says_that_there_is_no_other(checkpointer, folder):
    save(checkpointer, 1)
    checkpointer.wait()
    (folder / "1" / "inventory.json").unlink()
    with pytest.raises(AxcoreError, match=r"damaged.*no older checkpoint"):
        checkpointer.restore(abstract(make_state(1)))


@contextlib.contextmanager
def full_disk(kind: str, folder: pathlib.Path):
    """A disk with room for about one checkpoint of 4 MB that does not compress."""
    if kind == "size limit":
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        try:
            yield "File too large"
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    yield "No space left on device"
    ballast.unlink()


@pytest.mark.parametrize("kind", ["tmpfs", "size limit"])
def test_full_disk_is_one_sentence_and_earlier_checkpoints_stay(tmp_path, capfd, kind):
    if kind == "tmpfs":
        mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "none", tmp_path], capture_output=True)
        if mounted.returncode:
            pytest.skip("cannot mount a tmpfs")
    try:
        rng = np.random.default_rng(0)
        state = {f"w{i}": jnp.asarray(rng.integers(0, 1 << 31, 1 << 19, np.int32)) for i in range(2)}
        folder = tmp_path / "checkpoints"
        with Checkpointer.Config(keep=1).build(folder) as checkpointer:
            save(checkpointer, 1, state)
            checkpointer.wait()
            with full_disk(kind, tmp_path) as reason:
                with pytest.raises(AxcoreError) as caught:
                    save(checkpointer, 2, state)
                    checkpointer.wait()
                assert str(caught.value) == f"cannot write checkpoint {folder / '2'}: {reason}"
                assert checkpointer.steps() == [1]
                with pytest.raises(AxcoreError):  # a later call learns of a failure in the background too
                    save(checkpointer, 3, state)
                    while not checkpointer.should_save(3, 0.0):
                        pass
            assert_same_bits(checkpointer.restore(abstract(state)).state, state)
            save(checkpointer, 4, state)
        assert names(folder) == ["4"]
        assert capfd.readouterr() == ("", "")
    finally:
        if kind == "tmpfs":
            subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("below", ["a_file/checkpoints", "/proc/checkpoints"])
def test_unwritable_folder(tmp_path, below):
    (tmp_path / "a_file").touch()
    with Checkpointer.Config().build(tmp_path / below) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(AxcoreError, match=r"cannot write checkpoint .*/checkpoints/1: (Not a d|No such)"):
            save(checkpointer, 1)


def test_what_cannot_be_stored_is_named(checkpointer):
    with pytest.raises(AxcoreError, match=r"a\.b of the state is a str"):
        save(checkpointer, 1, {"a": {"b": "text"}})
    with pytest.raises(AxcoreError, match=r"both called 'a\.b'"):
        save(checkpointer, 1, {"a": {"b": jnp.ones(1)}, "a.b": jnp.ones(1)})
    with pytest.raises(AxcoreError, match=r"metadata .* is not JSON"):
        checkpointer.save(1, {"a": jnp.ones(1)}, data=b"", meta={"x": object()})


def test_an_unknown_step_lists_the_known_ones(checkpointer):
    save(checkpointer, 4)
    checkpointer.wait()
    with pytest.raises(AxcoreError, match=r"no checkpoint of step 5 in .*; it has 4"):
        checkpointer.meta(5)


def test_another_number_of_processes_is_refused(checkpointer, folder):
    save(checkpointer, 4)
    checkpointer.wait()
    record = folder / "4/record.json"
    content = json.loads(record.read_text())
    content["data"] *= 2
    record.write_text(json.dumps(content))
    inventory = folder / "4/inventory.json"
    listed = json.loads(inventory.read_text())
    listed["record.json"] = [record.stat().st_size, None]
    inventory.write_text(json.dumps(listed))
    with pytest.raises(AxcoreError, match="data positions of 2 processes, and this run has 1"):
        checkpointer.restore(abstract(make_state(4)))


def test_due_by_steps_and_by_minutes():
    policy = SavePolicy(every_steps=4, every_minutes=None)
    assert [step for step in range(1, 13) if policy.due(step, 0.0)] == [4, 8, 12]
    policy = SavePolicy(every_steps=None, every_minutes=1.0)
    assert [step for step in range(1, 13) if policy.due(step, 20.0 * step)] == [4, 7, 10]
    policy = SavePolicy(every_steps=5, every_minutes=1.0)  # a save by steps restarts the minutes
    assert [step for step in range(1, 13) if policy.due(step, 20.0 * step)] == [4, 5, 8, 10]
    assert not any(SavePolicy(None, None).due(step, 1e9 * step) for step in range(1, 5))


def test_several_processes_agree_on_the_step(monkeypatch):
    told = []
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(
        "axcore.train.checkpoint.save_policy.broadcast", lambda name, value: told.append(value) or b"30"
    )
    policy = SavePolicy(every_steps=None, every_minutes=1.0)
    assert [step for step in range(1, 35) if policy.due(step, 3.0 * step)] == [30]
    assert told == [b"21"]  # 20 steps of 3 s after the first; asked once


def test_bad_policy_is_a_config_error(folder):
    for bad in ({"every_steps": 0}, {"every_minutes": -1.0}, {"keep": 0}):
        with pytest.raises(ConfigError, match=next(iter(bad))):
            Checkpointer.Config(**bad).build(folder)
