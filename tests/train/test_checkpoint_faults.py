"""Checkpoints are atomic: killed processes, full disks, damaged files."""

import contextlib
import os
import resource
import subprocess
import tempfile
import time

import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import AxcoreError, OutOfMemory
from axcore.train import Checkpointer
from axcore.train.checkpoint import storage

from .checkpoint_states import abstract, assert_same_bits, make_state, names, run_python, save

pytestmark = pytest.mark.long


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def checkpointer(folder):
    with Checkpointer.Config(keep=2).build(folder) as built:
        yield built


KILL = """
    import os, pathlib, random, signal, sys, time, warnings
    import jax, numpy as np
    import orbax.checkpoint
    from axcore.train import Checkpointer
    warnings.simplefilter("ignore")  # os.fork: no jax backend runs yet
    folder, least = pathlib.Path(sys.argv[1]), int(sys.argv[2])

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
            assert (restored.data, restored.meta) == ([step], {"s": step})
            assert all((np.asarray(restored.state[name]) == x).all() for name, x in expected.items())

    def resume(ready):
        checkpointer = Checkpointer.Config(keep=2).build(folder)
        check(checkpointer)
        step = checkpointer.latest() or 0
        while True:
            step += 1
            arrays = jax.tree.map(jax.numpy.asarray, state(step))
            checkpointer.save(step, arrays, data=[step], meta={"s": step})
            os.write(ready, b".")

    rng, interrupted, committed, rounds = random.Random(1), 0, 0, 0
    while min(interrupted, committed) < least:
        rounds += 1
        assert rounds < 100, (interrupted, committed)
        reader, ready = os.pipe()
        child = fork(resume, ready)
        os.close(ready)
        for _ in range(rng.randint(1, 4)):
            assert os.read(reader, 1), "it died by itself"
        time.sleep(rng.uniform(0, 0.15))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)
        interrupted += any("tmp" in path.name or "removed" in path.name for path in folder.iterdir())
        committed += any(path.name.isdecimal() for path in folder.iterdir())
    assert os.waitpid(fork(lambda: check(Checkpointer.Config().build(folder))), 0)[1] == 0
"""


@pytest.mark.slow
def test_case_sigkill_at_any_moment_leaves_whole_checkpoints(folder):
    run_python(KILL, folder, 8)  # until 8 kills have interrupted a save


def test_old_checkpoints_are_deleted_after_the_new_one_is_written(checkpointer, monkeypatch):
    seen = []
    remove = storage._remove

    def watched(path):
        if path.name == storage.REMOVED and path.exists():
            seen.append((*sorted(each.name for each in path.iterdir()), checkpointer.steps()))
        remove(path)

    monkeypatch.setattr(storage, "_remove", watched)
    for step in (1, 5, 9, 12):
        save(checkpointer, step)
    checkpointer.wait()
    assert seen == [("1", [5, 9]), ("5", [9, 12])]


def test_a_checkpoint_is_listed_only_after_its_commit(checkpointer, monkeypatch):
    written = storage.inventory.write
    monkeypatch.setattr(storage.inventory, "write", lambda *args: (time.sleep(1), written(*args)))
    save(checkpointer, 1)
    assert checkpointer.latest() is None and checkpointer.steps() == []
    checkpointer.check()
    checkpointer.wait()
    assert checkpointer.latest() == 1


def test_check_raises_background_errors_and_the_save_can_be_retried(checkpointer, folder, monkeypatch, capfd):
    def full(*args):
        raise OSError(28, "No space left on device")

    save(checkpointer, 1)
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(storage.inventory, "write", full)
        save(checkpointer, 2)
        with pytest.raises(AxcoreError, match=rf"^cannot write checkpoint {folder}/2: No space left on device$"):
            wait_for_failure(checkpointer)
    checkpointer.check()  # the error is raised only once
    assert checkpointer.latest() == 1 and names(folder) == ["1"]
    save(checkpointer, 2)
    checkpointer.wait()
    assert_same_bits(checkpointer.restore(abstract(make_state(2))).state, make_state(2))
    assert capfd.readouterr() == ("", "")


def wait_for_failure(checkpointer):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        checkpointer.check()
        time.sleep(0.01)


@pytest.mark.parametrize("how", ["truncated", "one byte changed", "gone"])
def test_each_damaged_file_is_named_with_the_step_to_resume_from(checkpointer, folder, capfd, how):
    for step in (1, 2):
        save(checkpointer, step)
    checkpointer.wait()
    rng = np.random.default_rng(0)
    later = {"_CHECKPOINT_METADATA", "commit_success.txt"}  # nothing is restored from them
    victims = [path for path in sorted((folder / "2").rglob("*")) if path.is_file()]
    victims = [path for path in victims if str(path.relative_to(folder / "2")) not in later]
    assert len(victims) > 8
    for victim in victims:
        content = victim.read_bytes()
        if how == "gone":
            victim.unlink()
        elif how == "truncated":
            victim.write_bytes(content[: len(content) // 2])
        else:
            changed = bytearray(content)
            changed[rng.integers(len(content))] ^= 1
            victim.write_bytes(changed)
        with pytest.raises(AxcoreError, match=r"checkpoints/2 is damaged.*resume from step 1") as caught:
            checkpointer.restore(abstract(make_state(2)))
        message = str(caught.value)
        assert "\n" not in message and str(victim.relative_to(folder / "2")) in message
        victim.write_bytes(content)
    assert checkpointer.restore(abstract(make_state(2))).step == 2
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("RESOURCE_EXHAUSTED: Out of memory")])
def test_a_checkpoint_that_does_not_fit_in_memory_is_not_damaged(checkpointer, monkeypatch, error):
    save(checkpointer, 1)
    checkpointer.wait()

    def restore(*_):
        raise error

    monkeypatch.setattr(storage.Storage, "restore", restore)
    with pytest.raises(OutOfMemory, match=r"memory for the arrays of checkpoint .*/1.* Divide them between"):
        checkpointer.restore(abstract(make_state(1)))


def test_the_error_for_a_damaged_only_checkpoint_suggests_no_other(checkpointer, folder):
    save(checkpointer, 1)
    checkpointer.wait()
    (folder / "1" / "inventory.json").unlink()
    with pytest.raises(AxcoreError, match=r"damaged.*no older checkpoint"):
        checkpointer.restore(abstract(make_state(1)))


@contextlib.contextmanager
def full_disk(kind, folder):
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
def test_a_full_disk_raises_and_earlier_checkpoints_remain(tmp_path, capfd, kind):
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
                for step in (2, 3):
                    with pytest.raises(AxcoreError) as caught:
                        save(checkpointer, step, state)
                        wait_for_failure(checkpointer)
                    assert str(caught.value) == f"cannot write checkpoint {folder / str(step)}: {reason}"
                    assert checkpointer.steps() == [1]
            assert_same_bits(checkpointer.restore(abstract(state)).state, state)
            save(checkpointer, 3, state)
        assert names(folder) == ["3"]
        assert capfd.readouterr() == ("", "")
    finally:
        if kind == "tmpfs":
            subprocess.run(["umount", tmp_path], check=True)


@pytest.mark.parametrize("below", ["a_file/checkpoints", "/proc/checkpoints"])
def test_a_folder_that_cannot_be_written_is_named(tmp_path, below):
    (tmp_path / "a_file").touch()
    with Checkpointer.Config().build(tmp_path / below) as checkpointer:
        assert checkpointer.latest() is None
        with pytest.raises(AxcoreError, match=r"cannot write checkpoint .*/checkpoints/1: (Not a d|No such)"):
            save(checkpointer, 1)


@pytest.mark.skipif(os.geteuid() != 0, reason="requires root")
def test_missing_permission_is_named():
    nobody = 65534
    with tempfile.TemporaryDirectory() as folder, Checkpointer.Config().build(f"{folder}/checkpoints") as checkpointer:
        os.chmod(folder, 0o555)
        os.seteuid(nobody)
        try:
            with pytest.raises(AxcoreError, match=r"cannot write checkpoint .*/checkpoints/1: Permission denied$"):
                save(checkpointer, 1, {"a": np.ones(1)})
        finally:
            os.seteuid(0)
