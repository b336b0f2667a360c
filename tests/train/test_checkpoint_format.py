"""A checkpoint format that a plugin brings in place of Orbax: the same bits, and the same resumed run."""

import json
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError
from axcore.train import Checkpointer, CheckpointFormat
from axcore.train.callbacks.writers import read_jsonl

pytestmark = pytest.mark.long


@pytest.fixture
def npz(tiny_on_path):
    from axcore_tiny.npz import Npz

    return Npz


def state(seed):
    rng = np.random.default_rng(seed)
    return {
        "weight": jnp.asarray(rng.standard_normal((6, 4)), jnp.float32),
        "half": jnp.asarray(rng.standard_normal(5), jnp.bfloat16),
        "empty": jnp.zeros((0, 3)),
        "key": jax.random.key(seed),
        "step": jnp.int32(seed),
    }


def abstract(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def bits(tree):
    """path -> (dtype, shape, bytes)"""

    def of(leaf):
        plain = np.asarray(jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        return str(plain.dtype), plain.shape, plain.tobytes()

    return {jax.tree_util.keystr(path): of(leaf) for path, leaf in jax.tree.leaves_with_path(tree)}


def test_everything_comes_back_bit_for_bit(npz, tmp_path):
    with Checkpointer.Config(keep=2, format=npz.Config()).build(tmp_path) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(step, state(step), data=b"%d" % step, meta={"step": step})
        restored = checkpointer.restore(abstract(state(3)))
        assert bits(restored.state) == bits(state(3))
        assert (restored.data, restored.meta, checkpointer.steps()) == (b"3", {"step": 3}, [2, 3])
    found = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file())
    files = ("inventory.json", "record.json", "state/arrays.npz")
    assert found == [f"{step}/{file}" for step in (2, 3) for file in files]


def test_damage_is_found_whatever_the_format(npz, tmp_path):
    with Checkpointer.Config(format=npz.Config()).build(tmp_path) as checkpointer:
        for step in (1, 2):
            checkpointer.save(step, state(step), data=b"", meta={})
        checkpointer.wait()
        file = tmp_path / "2/state/arrays.npz"
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(AxcoreError, match=r"2 is damaged \(state/arrays\.npz .*resume from step 1"):
            checkpointer.restore(abstract(state(2)))


def test_a_checkpoint_in_another_format_is_refused_by_name(npz, tmp_path):
    with Checkpointer.Config(format=npz.Config()).build(tmp_path) as checkpointer:
        checkpointer.save(1, state(1), data=b"", meta={"a": 1})
    with Checkpointer.Config().build(tmp_path) as other:
        assert other.meta() == {"a": 1}  # needs no format
        with pytest.raises(AxcoreError) as error:
            other.restore(abstract(state(1)))
    for part in (
        "1 is in the format axcore_tiny.npz.Npz",
        "checkpointer.format is axcore.train.checkpoint.orbax_format.O",
    ):
        assert part in str(error.value)


class Failing(CheckpointFormat):
    """Fails in a call of its life, and counts its objects."""

    built = 0

    class Config(CheckpointFormat.Config):
        fails: str = ""

    def __init__(self, cfg):
        super().__init__(cfg)
        Failing.built += 1
        self.number = Failing.built

    def call(self, name):
        if name == self.config.fails and self.number == 1:
            raise ValueError(f"{name} went wrong\nand more")

    def save(self, folder, arrays):
        folder.mkdir()
        (folder / "arrays").write_text(", ".join(arrays))
        self.call("save")

    def wait(self):
        time.sleep(0.05)
        self.call("wait")

    def restore(self, folder, wanted):
        self.call("restore")
        return {path: jnp.full(form.shape, self.number, form.dtype) for path, form in wanted.items()}


@pytest.mark.parametrize("fails", ["save", "wait"])
def test_a_failed_save_leaves_nothing_and_the_next_has_a_new_object(tmp_path, monkeypatch, fails):
    monkeypatch.setattr(Failing, "built", 0)
    with Checkpointer.Config(format=Failing.Config(fails=fails)).build(tmp_path) as checkpointer:
        with pytest.raises(AxcoreError, match=rf"cannot write checkpoint .*/1: ValueError: {fails} went wrong$"):
            checkpointer.save(1, {"a": jnp.ones(2)}, data=b"", meta={})
            checkpointer.wait()
        assert list(tmp_path.iterdir()) == []
        checkpointer.save(1, {"a": jnp.ones(2)}, data=b"", meta={})
        assert checkpointer.restore({"a": jax.ShapeDtypeStruct((2,), jnp.float32)}).state["a"].tolist() == [2, 2]


def test_a_checkpoint_that_the_format_cannot_read_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setattr(Failing, "built", 0)
    with Checkpointer.Config(format=Failing.Config(fails="restore")).build(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)}, data=b"", meta={})
        with pytest.raises(AxcoreError, match=r"1 is damaged \(ValueError: restore went wrong\)"):
            checkpointer.restore({"a": jnp.ones(2)})


def test_nothing_counts_before_the_format_says_that_it_is_on_disk(tmp_path):
    with Checkpointer.Config(format=Failing.Config()).build(tmp_path) as checkpointer:
        checkpointer.save(1, {"a": jnp.ones(2)}, data=b"", meta={})
        assert checkpointer.steps() == [] and [path.name for path in tmp_path.iterdir()] == ["1.tmp"]
        checkpointer.wait()
        assert checkpointer.steps() == [1] and [path.name for path in tmp_path.iterdir()] == ["1"]


def test_killed_in_a_save_the_run_resumes_to_the_bits_that_it_has_with_orbax(processes, corpus, tiny, npz, tmp_path):
    def start(name, *flags):
        arguments = ("--set", f"input.source.folder={corpus}", "--set", "steps=25", "--out", tmp_path / name)
        return processes.start("train", "tiny", "--use", "rope", *arguments, *flags)

    def losses(name):
        return [row["train/loss"] for row in read_jsonl(tmp_path / name / "metrics.jsonl") if "train/loss" in row]

    def last(name, **options):
        with Checkpointer.Config(**options).build(tmp_path / name / "checkpoints") as checkpointer:
            return bits(checkpointer.restore(tiny.build().program().state, 25).state)

    killed = tmp_path / "killed" / "checkpoints"
    use = ("--use", "npz:seconds=0.3")
    done = start("orbax").wait()
    assert done.code == 0, done.err
    first = start("killed", *use)
    assert first.kill_when(lambda: (killed / "20.tmp/state/arrays.npz").exists())
    assert sorted(path.name for path in killed.iterdir()) == ["10", "20.tmp"]
    resumed = start("killed", *use, "--resume").wait()
    assert resumed.code == 0, resumed.err
    assert "resuming after step 10" in resumed.err
    assert losses("killed") == losses("orbax") and len(losses("orbax")) == 25
    assert last("killed", format=npz.Config()) == last("orbax")
    assert json.loads((tmp_path / "killed/summary.json").read_text())["plugins"].keys() == {"rope", "tiny"}


def test_the_format_is_part_of_the_config(npz, tiny):
    cfg = tiny.set(checkpointer=tiny.checkpointer.set(format=npz.Config(seconds=1.0)))
    assert "checkpointer.format: axcore_tiny.npz.Npz\n" in cfg.text()
    assert ax.from_json(ax.to_json(cfg)) == cfg
