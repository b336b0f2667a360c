"""Measuring block sizes, and applying them: a kernel whose large blocks are slow."""

import json
import re
import warnings
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import axcore as ax
import axcore.aot.tune
from axcore.aot import explain
from axcore.aot.tune import example, tune
from axcore.nn import Attention, ChooseKernel, KernelRequest, ReferenceKernel, TunableKernel, Tuning
from axcore.nn.attention.formula import dense_attention
from axcore.nn.attention.tuned import TuningFile
from axcore.nn.choosing import recording
from axcore.testing import tiny_model

CALLED = []
NOW = [0.0]
"""Time, which only slow kernels advance, so that the load of the machine does not matter."""


def slow(x, milliseconds):
    def wait(x):
        NOW[0] += milliseconds / 1e3
        return np.asarray(x)

    return jax.pure_callback(wait, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


class Blocks(TunableKernel):
    """The smaller the block, the faster. Blocks of 3 fail."""

    class Config(TunableKernel.Config):
        block: ax.PositiveInt | None = None

    uses_dtypes = False

    def candidates(self, request):
        return ({"block": 40}, {"block": 3}, {"block": 10}, {"block": request.head_dim})

    def __call__(self, inputs):
        block = self.settings(KernelRequest.of(inputs))["block"]
        CALLED.append(block)
        if block == 3:
            raise ValueError("3 does not divide the length\nand more")
        heads, lse = dense_attention(inputs)
        return heads + 0 * slow(jax.lax.stop_gradient(inputs.q), block)[..., :1], lse


def model(**fields):
    order = Blocks.Config(**fields), ReferenceKernel.Config()
    return ax.select(tiny_model(), Attention).set(kernel=ChooseKernel.Config(order=order))


@pytest.fixture(scope="module")
def measured():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(axcore.aot.tune, "time", SimpleNamespace(perf_counter=lambda: NOW[0]))
        return tune(model(), repeats=3)


def test_tune_measures_every_candidate_of_every_kernel(measured):
    by_settings = {(each.kernel, *each.settings.values()): each for each in measured.timings}
    assert set(by_settings) == {("Blocks", 40), ("Blocks", 3), ("Blocks", 10), ("Blocks", 4), ("reference",)}
    seconds = [by_settings["Blocks", block].seconds for block in (4, 10, 40)]
    assert seconds[0] < seconds[1] < seconds[2]
    assert by_settings["Blocks", 3].problem == "ValueError: 3 does not divide the length"
    shown = str(measured).splitlines()
    assert "query_len=128" in shown[2] and shown[4].split()[0] == "Blocks" and shown[4].endswith("block=4")


def test_the_file_holds_the_fastest_settings_and_order(measured, tmp_path):
    measured.file().write(tmp_path / "tuning.json")
    found = TuningFile.read(tmp_path / "tuning.json")
    assert found.order == ("reference", "Blocks")
    (settings,) = found.kernels["Blocks"].values()
    assert settings == {"block": 4}
    cfg = ax.pipe(model(), ax.use("tuned", file=str(tmp_path / "tuning.json")))
    kernels = cfg.decoder.layers.attention.kernel.order
    assert [type(each).__qualname__ for each in kernels] == ["Blocks.Config", "ReferenceKernel.Config"]
    assert kernels[0].tuning.settings == found.kernels["Blocks"]
    cfg = ax.pipe(model(), ax.use("tuned", file=str(tmp_path / "tuning.json"), order=True))
    assert [type(each) for each in cfg.decoder.layers.attention.kernel.order] == [type(each) for each in kernels[::-1]]


def blocks_used(cfg):
    CALLED.clear()
    fn, params, state = ax.module.functional(cfg.build(rngs=ax.Rngs(0)))
    jax.eval_shape(lambda: fn(params, state, np.zeros((1, 128), np.int32)))
    return set(CALLED)


def test_a_field_comes_before_the_measured_settings_and_those_before_the_default(measured):
    file = measured.file()
    tuning = Tuning(device_kind=file.device_kind, settings=file.kernels["Blocks"])
    assert blocks_used(model()) == {40}
    assert blocks_used(model(tuning=tuning)) == {4}
    assert blocks_used(model(tuning=tuning, block=10)) == {10}


def test_default_settings_in_place_of_measured_ones_are_reported(measured):
    file = measured.file()
    ((signature, settings),) = file.kernels["Blocks"].items()
    other = Tuning(device_kind=file.device_kind, settings={signature.replace("128", "64"): settings})
    told = rf"^Blocks: its tuning has no settings for the call '{re.escape(signature)}', .* the defaults block=40"
    with pytest.warns(UserWarning, match=told):
        assert blocks_used(model(tuning=other)) == {40}
    (slot,) = [each for each in explain(model(tuning=other)).slots if each.kind == "attention kernel"]
    expected = f"chosen; block=40 (defaults: the tuning has no settings for the call {signature!r})"
    assert expected in [each.verdict for each in slot.candidates]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        blocks_used(model(tuning=other, block=10))
        blocks_used(model(tuning=other.set(settings=file.kernels["Blocks"])))


@pytest.mark.parametrize(
    ("cfg", "names", "told"),
    [
        (model(), ["splash"], "has the order splash, but the config has an order of"),
        (ax.select(tiny_model(), Attention).set(kernel=Blocks.Config()), ["Blocks"], "has no order of kernels"),
    ],
    ids=["other kernels", "no order"],
)
def test_an_order_without_effect_is_refused(cfg, names, told, tmp_path):
    kernels = {"Blocks": {"call": {"block": 4}}}
    TuningFile("cpu", kernels, tuple(names)).write(tmp_path / "tuning.json")
    ax.use("tuned", file=str(tmp_path / "tuning.json"))(cfg)
    with pytest.raises(ax.ConfigError, match=f"order=True has no effect: .*{told}"):
        ax.use("tuned", file=str(tmp_path / "tuning.json"), order=True)(cfg)


def test_explain_shows_the_settings(measured):
    file = measured.file()
    tuning = Tuning(device_kind=file.device_kind, settings=file.kernels["Blocks"])
    for cfg, shown in (
        (model(), "chosen; block=40 (not measured)"),
        (model(tuning=tuning), "chosen; block=4 (measured)"),
    ):
        (slot,) = [each for each in explain(cfg).slots if each.kind == "attention kernel"]
        assert shown in [each.verdict for each in slot.candidates]
        assert slot.layers == 2


def test_settings_of_another_device_are_refused():
    cfg = model(tuning=Tuning(device_kind="NVIDIA H100 80GB HBM3"))
    told = r"attention\.kernel: Blocks: tuning was measured on 'NVIDIA H100 80GB HBM3', but the call runs on 'cpu'"
    with pytest.raises(ax.ConfigError, match=told):
        blocks_used(cfg)
    with pytest.raises(ax.ConfigError, match=told):
        explain(cfg)
    with pytest.raises(ax.ConfigError, match=r"gpu-h200-1 has NVIDIA H200 devices, and this machine has cpu"):
        tune(model(), "gpu-h200-1")


def test_settings_with_unknown_fields_are_refused(measured):
    (signature,) = measured.file().kernels["Blocks"]
    with pytest.raises(ax.ConfigError, match="tuning sets size, but the settings are block"):
        blocks_used(model(tuning=Tuning(device_kind="cpu", settings={signature: {"size": 1}})))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (None, r"cannot read the tuning file .*\. Write it with `axcore tune RECIPE --out "),
        ("{", "not a file that `axcore tune` wrote"),
        ("{}", "not a file that `axcore tune` wrote"),
        ("null", "must be an object with device_kind, kernels, order"),
        ('{"device_kind": "cpu", "kernels": {}, "order": [], "more": 1}', "must be an object with device_kind"),
        ('{"device_kind": "cpu", "kernels": [], "order": []}', "kernels must be an object"),
        ('{"device_kind": "cpu", "kernels": {"reference": {}}, "order": "reference"}', "order must be a list"),
        ('{"device_kind": "cpu", "kernels": {"reference": {}}, "order": [1]}', "order must be a list"),
        ('{"device_kind": "cpu", "kernels": {}, "order": ["reference", "reference"]}', "order must be a list"),
        ('{"device_kind": "cpu", "kernels": {"a": {"b": 1}}, "order": []}', "not a file that `axcore tune` wrote|b"),
        (
            '{"device_kind": "cpu", "kernels": {"splash": {"s": {}}}, "order": []}',
            "kernels splash, but .* Blocks",
        ),
        ('{"device_kind": "cpu", "kernels": {"Blocks": {}}, "order": []}', "has no block sizes"),
        ('{"device_kind": "cpu", "kernels": {}, "order": ["reference"]}', "only an order .* Apply it with order=True"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, text, told):
    if text is not None:
        (tmp_path / "tuning.json").write_text(text)
    with pytest.raises(ax.ConfigError, match=told):
        ax.pipe(model(), ax.use("tuned", file=str(tmp_path / "tuning.json")))


def test_examples_have_the_request_that_they_are_made_for():
    with recording() as found:
        cfg = ax.select(tiny_model(), Attention).set(softcap=3.0, dropout=0.1, sinks=ax.nn.Zeros())
        fn, params, state = ax.module.functional(cfg.build(rngs=ax.Rngs(0)))
        segments = np.ones((2, 16), np.int32)
        key = jax.random.key(0)
        jax.eval_shape(lambda: fn(params, state, segments, segment_ids=segments, training=True, key=key))
    (request,) = found[0].requests
    assert {"softcap", "sinks", "dropout"} == set(request.options) and request.packed
    assert KernelRequest.of(example(request)) == request


def test_command_tune_has_nothing_to_apply_for_one_kernel(axcore, corpus, tmp_path, tiny_on_path, fresh_registry):
    file = tmp_path / "tuning.json"
    done = axcore("tune", "tiny", "--set", f"input.source.folder={corpus}", "--out", str(file))
    assert done.code == 0 and "reference" in done.out
    assert "nothing to apply" in done.out and "tuned:file" not in done.out  # `use("tuned")` would refuse the file
    assert json.loads(file.read_text()) == {"device_kind": "cpu", "kernels": {}, "order": ["reference"]}
