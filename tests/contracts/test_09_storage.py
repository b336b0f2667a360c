"""Contract 9, storage: a checkpoint restores exactly onto other devices, a changed byte raises, and a failed commit is
never the latest checkpoint."""

import os
import subprocess
import sys
import textwrap

import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import AxcoreError
from axcore.train import Checkpointer
from axcore.train.checkpoint import storage

RESHARD = """
    import sys
    import jax, jax.numpy as jnp, numpy as np
    from jax.sharding import NamedSharding, PartitionSpec as P
    from axcore.train import Checkpointer

    folder, rows, columns = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(rows, columns), ("data", "tensor"))
    with Checkpointer.Config().build(folder) as checkpointer:
        wanted = {
            path: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
            for path, shape, dtype, spec in (
                ("weight", (16, 24), jnp.float32, P("data", "tensor")),
                ("moment", (16, 24), jnp.bfloat16, P("tensor")),
                ("step", (), jnp.int32, P()),
            )
        }
        restored = checkpointer.restore(wanted)
        assert all(leaf.sharding == wanted[path].sharding for path, leaf in restored.state.items())
        checkpointer.save(restored.step + 1, restored.state, data=restored.data, meta=restored.meta)
"""


@pytest.fixture
def checkpointer(tmp_path):
    with Checkpointer.Config().build(tmp_path / "checkpoints") as built:
        yield built


def state(step):
    rng = np.random.default_rng(step)
    weight = rng.standard_normal((16, 24))
    return {"weight": jnp.float32(weight), "moment": jnp.bfloat16(weight**2), "step": jnp.int32(step)}


@pytest.mark.slow
def test_resharding_from_1_to_8_to_2x4_devices_and_back_is_exact(checkpointer):
    checkpointer.save(1, state(1), data={"next": 3}, meta={"loss": 0.1})
    checkpointer.wait()
    for shape in (("8", "1"), ("2", "4")):
        subprocess.run(
            [sys.executable, "-c", textwrap.dedent(RESHARD), str(checkpointer.folder), *shape],
            env=os.environ
            | {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            },
            check=True,
        )
    restored = checkpointer.restore(state(1))
    assert (restored.step, restored.data, restored.meta) == (3, {"next": 3}, {"loss": 0.1})
    for path, leaf in state(1).items():
        assert np.asarray(leaf).tobytes() == np.asarray(restored.state[path]).tobytes()


def test_a_changed_byte_in_an_array_raises(checkpointer):
    for step in (1, 2):
        checkpointer.save(step, state(step), data=None, meta={})
    checkpointer.wait()
    files = [path for path in storage.inventory.files(checkpointer.folder / "2/state") if "/d/" in str(path)]
    assert files
    for path in files:
        content = path.read_bytes()
        for at in range(0, len(content), max(1, len(content) // 5)):
            path.write_bytes(content[:at] + bytes([content[at] ^ 16]) + content[at + 1 :])
            with pytest.raises(AxcoreError, match=f"2 is damaged .*{path.name}.*resume from step 1"):
                checkpointer.restore(state(2))
        path.write_bytes(content)


def test_a_failed_commit_is_not_the_latest_and_can_be_retried(checkpointer, monkeypatch):
    checkpointer.save(1, state(1), data=None, meta={})
    checkpointer.wait()
    with monkeypatch.context() as patch:
        patch.setattr(storage.inventory, "write", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
        checkpointer.save(2, state(2), data=None, meta={})
        with pytest.raises(AxcoreError, match=r"cannot write checkpoint .*/2: No space left"):
            checkpointer.wait()
    assert checkpointer.latest() == 1
    checkpointer.save(2, state(2), data=None, meta={})
    checkpointer.wait()
    assert checkpointer.latest() == 2
