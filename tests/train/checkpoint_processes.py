"""One of two processes that save checkpoints together. Prints its results and errors as JSON.

`python -m tests.train.checkpoint_processes PROCESS PORT FOLDER`
"""

import contextlib
import json
import os
import pathlib
import resource
import sys
import time

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

from axcore.config import AxcoreError
from axcore.runtime import processes
from axcore.train import Checkpointer
from axcore.train.checkpoint import storage


def values(step):
    rng = np.random.default_rng(step)
    return {"sharded": rng.standard_normal((64, 1024)).astype(np.float32), "replicated": rng.standard_normal(5)}


def state(step):
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("x",))
    shardings = {"sharded": NamedSharding(mesh, P("x")), "replicated": NamedSharding(mesh, P())}
    return jax.tree.map(
        lambda leaf, where: jax.make_array_from_callback(leaf.shape, where, lambda index: leaf[index]),
        jax.tree.map(lambda leaf: leaf.astype(np.float32), values(step)),
        shardings,
    )


@contextlib.contextmanager
def limited_files(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def replaced(write):
    """Replaces the function that writes the inventory."""
    original = storage.inventory.write
    storage.inventory.write = lambda folder, entries: write(original, folder, entries)
    try:
        yield
    finally:
        storage.inventory.write = original


def no_space(original, folder, entries):
    raise OSError(28, "No space left on device")


def occupied(original, folder, entries):
    """Creates a folder under the final name of the checkpoint."""
    original(folder, entries)
    target = folder.with_name(folder.name.partition(".")[0])
    target.mkdir()
    (target / "file").touch()


def told(call):
    try:
        call()
    except AxcoreError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def main(process, port, folder):
    jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
    found = {}
    with Checkpointer.Config(keep=2).build(folder) as checkpointer:

        def save(step):
            checkpointer.save(step, state(step), data={"position": step}, meta={})
            checkpointer.wait()

        for step in (1, 2, 3):
            save(step)
        found["steps"] = checkpointer.steps()
        restored = checkpointer.restore(state(3))
        own = restored.state["sharded"].addressable_shards[0]
        found["exact"] = bool((own.data == values(3)["sharded"][own.index]).all())
        found["data"] = restored.data

        def fails(name, on, fault):
            with fault if process == on else contextlib.nullcontext():
                found[name] = [told(lambda: save(4)), checkpointer.latest()]

        fails("record", 0, limited_files(64))
        fails("arrays of 1", 1, limited_files(64))
        fails("inventory", 0, replaced(no_space))
        fails("commit", 0, replaced(occupied))
        if process == 0:
            (folder / "4" / "file").unlink()
            (folder / "4").rmdir()
        save(4)
        checkpointer.delete_after(3)
        found["deleted"] = checkpointer.steps()
        save(4)
        found["at last"] = checkpointer.steps()

        victim = max((folder / "4").rglob("ocdbt.process_1/d/*"), key=lambda path: path.stat().st_size)
        content = victim.read_bytes()
        if process == 0:
            victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        found["damage"] = told(lambda: (time.sleep(1), checkpointer.restore(state(4))))
        if process == 0:
            victim.write_bytes(content)
    (folder / "a_file").touch()
    with Checkpointer.Config().build(folder / "a_file/checkpoints") as other:
        found["folder"] = told(lambda: other.save(1, state(1), data=None, meta={}))
    os.environ["AXCORE_TIMEOUT"] = "2"
    with Checkpointer.Config().build(folder) as late:
        if process == 0:
            found["late"] = told(lambda: late.restore(state(4)))
        else:
            time.sleep(4)
    return found


if __name__ == "__main__":
    rank = int(sys.argv[1])
    print(json.dumps(main(rank, sys.argv[2], pathlib.Path(sys.argv[3]))), flush=True)
    processes.barrier("end", 60)
    time.sleep(1 if rank == 0 else 0)  # process 0 hosts the service that process 1 still uses
    os._exit(0)  # a normal exit would wait for the barrier that one process missed on purpose
