"""Models with INT8 that would compute NaN or lose their codes are refused before a step."""

import jax
import jax.numpy as jnp
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.numerics import calibration_paths
from axcore.testing import tiny_model
from axcore.train import FromRun, Learner, save_model
from axcore.train.checkpoint.initial import initial_arrays
from axcore.train.checkpoint.model_folder import flat
from axcore.train.data import TextFiles, TextInput
from axcore.train.step.program import program


def model(**options):
    return ax.use("int8", where="decoder.**", **options)(tiny_model())


def stored_model(**options):
    return ax.select(model(**options), lambda _, node: ax.config.has_field(node, "stored")).set(stored=True)


def made(cfg, **learner):
    return program(cfg, Learner.Config(**learner), ax.parallel.Mesh().make(jax.devices()[:1]))


def test_stored_weights_cannot_be_trained_unless_they_are_frozen():
    cfg = stored_model(activation_scales=None)
    with pytest.raises(ax.ConfigError, match=r"^model\.decoder\..*\.weight\.codes: int8 parameters.*learner\.rates"):
        made(cfg)
    made(cfg, rates={"**.weight.*": 0.0})


def test_stored_weights_keep_their_number_format():
    with pytest.raises(ax.ConfigError, match=r"numerics is Int8\.Config with stored weights"):
        ax.use("int8", where="decoder.**")(stored_model())


def test_a_run_without_measured_statistics_does_not_start(tmp_path):
    for number in range(20):
        (tmp_path / f"{number}.txt").write_text(f"text {number} " * 100)
    source = TextFiles.Config(folder=str(tmp_path), validation_percent=50.0)
    cfg = ax.Trainer.Config(
        model=model(activation_scales="static").set(vocab_size=264),
        input=TextInput.Config(source=source, seq_len=8, batch_size=2),
        steps=1,
    )
    with pytest.raises(ax.ConfigError, match=r"must be measured.*\n  model\.decoder\.layers\..*input_amax"):
        ax.fit(cfg, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_weights_without_measured_statistics_are_not_loaded(tmp_path):
    cfg = model(activation_scales="static")
    float_model, (_, shapes, state) = tiny_model(), abstract(cfg)
    _, params, _ = ax.functional(float_model.build(rngs=ax.Rngs(0)))
    folder = save_model(tmp_path / "float", float_model, params)
    with pytest.raises(ax.ConfigError, match="must be measured"):
        initial_arrays(FromRun.Config(folder=str(folder)), cfg, flat(shapes), flat(state), 0)
    measured = {path: jnp.ones(form.shape) for path, form in flat(state).items()}
    assert set(measured) == set(calibration_paths(cfg))
    folder = save_model(tmp_path / "measured", cfg, params, measured)
    found = initial_arrays(FromRun.Config(folder=str(folder)), cfg, flat(shapes), flat(state), 0)
    assert all((found[path] == 1).all() for path in measured)
