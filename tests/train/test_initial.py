"""Runs that start from given weights, and model folders."""

import json
import shutil

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.config import AxcoreError
from axcore.module import functional
from axcore.nn import Sequence, layers_of
from axcore.plugin import use_text
from axcore.testing import tiny_batch, tiny_model
from axcore.train import Checkpointer, FromRun, Initial, ModelFolder, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat, like

pytestmark = pytest.mark.long


def logits(cfg, params, state):
    return functional(cfg.build(rngs=ax.Rngs(0)))[0](params, state, tiny_batch()["inputs"])[0][0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(folder, config, output of the model)."""
    cfg = ax.select(tiny_model(), "decoder").set(num_layers=4)
    fn, params, state = functional(cfg.build(rngs=ax.Rngs(5)))
    folder = save_model(tmp_path_factory.mktemp("models") / "one", cfg, params, state, files={"note.txt": b"hello"})
    return folder, cfg, fn(params, state, tiny_batch()["inputs"])[0][0]


def loaded(cfg, initial):
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    forms = [
        {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat(tree).items()}
        for tree in (params, state)
    ]
    arrays = initial_arrays(initial, cfg, *forms, 0)
    return like(params, arrays), like(state, arrays)


def unrolled(cfg):
    return cfg.set(decoder=Sequence.Config(layers=tuple(place.config for place in layers_of(cfg.decoder))))


@pytest.mark.parametrize(
    "restack", [lambda cfg: cfg, unrolled, lambda cfg: ax.pipe(cfg, ax.use("sliding-window", size=8, global_every=2))]
)
def test_weights_load_into_differently_stacked_layers(saved, restack):
    folder, cfg, expected = saved
    other = restack(cfg)
    params, state = loaded(other, FromRun.Config(folder=str(folder)))
    np.testing.assert_allclose(logits(other, params, state), expected, rtol=1e-5, atol=1e-6)


def test_a_model_folder_has_the_config_and_extra_files(saved):
    folder, cfg, _ = saved
    found = ModelFolder.open(folder)
    assert found.model == cfg and found.tokenizer is None
    assert (folder / "note.txt").read_bytes() == b"hello"


def test_mismatches_are_listed_by_layer_and_nothing_is_loaded(saved):
    folder, cfg, _ = saved
    initial = FromRun.Config(folder=str(folder))
    with pytest.raises(
        AxcoreError, match=r"decoder\.0\.ffn\.down\.weight: the model in one has \(24, 16\), expected \(20, 16\)"
    ):
        loaded(ax.select(cfg, "**.ffn").set(hidden_dim=20), initial)
    with pytest.raises(
        AxcoreError,
        match=r"initial \(FromRun\) does not fit the model:\n  decoder\.layers.*key_norm\.scale: missing",
    ):
        loaded(ax.pipe(cfg, ax.use("qk-norm")), initial)
    fewer = ax.select(cfg, "decoder").set(num_layers=3)
    with pytest.raises(AxcoreError, match=r"has parameters that this model lacks.*\n  decoder\.3\."):
        loaded(fewer, initial)
    loaded(fewer, initial.set(drop=("decoder.3.**",)))


@pytest.mark.parametrize("restack", [lambda cfg: cfg, unrolled])
def test_weights_are_cast_to_other_float_dtypes_but_not_integers(saved, restack):
    folder, cfg, _ = saved
    expected = loaded(restack(cfg), FromRun.Config(folder=str(folder)))
    wanted = [
        {path: jax.ShapeDtypeStruct(leaf.shape, jax.numpy.bfloat16) for path, leaf in flat(tree).items()}
        for tree in expected
    ]
    arrays, missing, extra = ModelFolder.open(folder).load(restack(cfg), *wanted)
    assert not missing and not extra
    for path, leaf in {**flat(expected[0]), **flat(expected[1])}.items():
        np.testing.assert_array_equal(arrays[path], leaf.astype(jax.numpy.bfloat16))
    wanted[0]["norm.scale"] = jax.ShapeDtypeStruct((16,), jax.numpy.int8)
    with pytest.raises(AxcoreError, match=r"norm\.scale: the checkpoint has float32\[16\], expected int8\[16\]"):
        ModelFolder.open(folder).load(restack(cfg), *wanted)


def test_allowed_new_parameters_are_initialized_by_the_model(saved):
    folder, cfg, expected = saved
    normed = ax.pipe(cfg, ax.use("lora", rank=2))
    params, state = loaded(normed, FromRun.Config(folder=str(folder), allow_new=("**.adapter.**",)))
    np.testing.assert_allclose(
        logits(normed, params, state), expected, rtol=1e-5, atol=1e-6
    )  # an adapter starts at zero


class Poisoned(Initial):
    """Weights with a NaN in them."""

    class Config(Initial.Config):
        """No fields."""

    def load(self, model, params, state):
        arrays = {path: jax.numpy.ones(form.shape, form.dtype) for path, form in params.items()}
        return {**arrays, "norm.scale": arrays["norm.scale"].at[0].set(np.nan)}


class Misshaped(Initial):
    """Unknown parameters, and arrays of wrong shapes."""

    class Config(Initial.Config):
        """No fields."""

    def load(self, model, params, state):
        return {"norm.scale": jax.numpy.ones((3,)), "nobody": jax.numpy.ones(())}


class Tied(Initial):
    """One array for all parameters of one shape."""

    class Config(Initial.Config):
        """No fields."""

    def load(self, model, params, state):
        ones = {form.shape: jax.numpy.ones(form.shape, form.dtype) for form in params.values()}
        return {path: ones[form.shape] for path, form in params.items()}


@pytest.mark.slow
def test_one_array_may_initialize_several_parameters(tiny, tmp_path):
    assert np.isfinite(ax.fit(tiny.set(steps=2, initial=Tied.Config()), out=tmp_path / "a")["validation/bits_per_byte"])


def test_nonfinite_values_and_mismatched_arrays_raise():
    with pytest.raises(AxcoreError, match=r"initial \(Poisoned\) has values that are not finite:\n  norm\.scale"):
        loaded(tiny_model(), Poisoned.Config())
    with pytest.raises(
        AxcoreError, match=r"nobody: not a parameter of this model\n  norm\.scale: \(3,\) float32, expected \(16,\)"
    ):
        loaded(tiny_model(), Misshaped.Config())


def test_a_run_starts_from_another_run_and_resumes_from_itself(tiny, tmp_path):
    first = ax.fit(tiny.set(steps=4), out=tmp_path / "a")
    cfg = tiny.set(steps=3, initial=FromRun.Config(folder=str(tmp_path / "a")))
    assert ax.pipe(tiny.set(steps=3), use_text(f"run-weights:folder={tmp_path / 'a'}")) == cfg
    second = ax.fit(cfg, out=tmp_path / "b")
    assert second["validation/bits_per_byte"] < first["validation/bits_per_byte"]
    fresh = ax.fit(tiny.set(steps=3), out=tmp_path / "c")
    assert second["validation/bits_per_byte"] < fresh["validation/bits_per_byte"]
    assert (
        ax.fit(cfg, out=tmp_path / "b", resume=True)["validation/bits_per_byte"] == second["validation/bits_per_byte"]
    )


def test_a_run_killed_before_its_first_checkpoint_reloads_initial(tiny, tmp_path):
    ax.fit(tiny.set(steps=4), out=tmp_path / "a")
    cfg = tiny.set(steps=3, initial=FromRun.Config(folder=str(tmp_path / "a")))
    expected = ax.fit(cfg, out=tmp_path / "b")["validation/bits_per_byte"]
    for step in (tmp_path / "b" / "checkpoints").iterdir():
        shutil.rmtree(step)
    (tmp_path / "b" / "checkpoints" / "2.orbax-checkpoint-tmp").mkdir()
    assert ax.fit(cfg, out=tmp_path / "b", resume=True)["validation/bits_per_byte"] == expected


def test_a_run_that_fails_to_start_does_not_move_an_earlier_run(tiny, tmp_path):
    ax.fit(tiny.set(steps=1), out=tmp_path / "a")
    with pytest.raises(AxcoreError, match=r"is not a model folder: config\.json: No such file"):
        ax.fit(tiny.set(steps=1, initial=FromRun.Config(folder=str(tmp_path / "none"))), out=tmp_path / "a")
    assert (tmp_path / "a" / "summary.json").exists() and not (tmp_path / "a.1").exists()


def test_invalid_folders_have_distinct_errors(saved, tmp_path):
    folder, cfg, _ = saved
    _, params, state = functional(cfg.build(rngs=ax.Rngs(0)))
    with pytest.raises(AxcoreError, match="already exists"):
        save_model(folder, cfg, params, state)
    for content in ("{", "[]", "{}", '{"plugins": [1]}', '{"plugins": {}}'):
        (tmp_path / "config.json").write_text(content)
        with pytest.raises(AxcoreError, match=r"is not a model folder|config\.json: "):
            ModelFolder.open(tmp_path)
    content = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**content, "plugins": {"nobody": "axcore-nobody 1.0"}}))
    with pytest.raises(
        AxcoreError, match=r"requires the plugin 'nobody' \(axcore-nobody 1\.0\), which is not installed"
    ):
        ModelFolder.open(tmp_path)


def test_save_model_is_atomic(saved, tmp_path, monkeypatch):
    _, cfg, expected = saved
    _, params, state = functional(cfg.build(rngs=ax.Rngs(5)))
    monkeypatch.setattr(Checkpointer, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(tmp_path / "model", cfg, params, state)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    (tmp_path / ".model.partial" / "checkpoints" / "0").mkdir(parents=True)  # what a killed process leaves
    folder = save_model(tmp_path / "model", cfg, params, state)
    assert list(tmp_path.iterdir()) == [folder]
    found = loaded(cfg, FromRun.Config(folder=str(folder)))
    np.testing.assert_allclose(logits(cfg, *found), expected, rtol=1e-5, atol=1e-6)


def interrupted(self, *args, **kwargs):
    assert (self.folder.parent / "config.json").exists()
    raise KeyboardInterrupt
