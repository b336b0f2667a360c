"""Programs compiled for a target, and what the report says of them."""

import dataclasses
import importlib.util
import json
import pathlib
import shutil
import subprocess

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.aot import Target, compile_program, report_page
from axcore.aot.chips import CHIPS
from axcore.aot.memory import Memory
from axcore.aot.targets import torus
from axcore.config import OutOfMemory, allocating
from axcore.nn import ReferenceKernel
from axcore.testing.devices import on_devices
from axcore.train.data.form import batch_form

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
OUT_OF_MEMORY = (  # of libtpu 0.0.52
    "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
    "temporaries (18.62T) exceeds available HBM (95.73G). HLO module: jit_train_step.\n"
    "See https://openxla.org/xla/errors/error_1000 for more details."
)


@pytest.fixture(scope="module")
def one_device(tiny):
    """The tiny recipe and its report for the device of this process."""
    cfg = tiny.set(mesh=tiny.mesh.set(shape={"data": 1}))
    return cfg, compile_program(cfg, "cpu-1")


def test_unknown_targets_are_rejected_with_the_known_ones():
    with pytest.raises(ax.ConfigError, match=r"'gpu-h900-8' names an accelerator .* Known: cpu, tpu-v4, .*gpu-h100"):
        Target.of("gpu-h900-8")
    with pytest.raises(ax.ConfigError, match="is not an accelerator; examples"):
        Target.of("h100")
    jax.devices()
    with pytest.raises(ax.ConfigError, match=r"has 99 devices, and this process has already started JAX with \d"):
        Target.of("cpu-99").devices()


def test_slices_have_the_published_shapes():
    shapes = {(8, 2): (2, 4), (256, 2): (16, 16), (4, 3): (2, 2, 1), (16, 3): (2, 2, 4), (256, 3): (4, 8, 8)}
    assert {case: torus(*case) for case in shapes} == shapes
    with pytest.raises(ax.ConfigError, match=r"no slice has 6 TPU chips\. The nearest sizes are 4 and 8"):
        torus(6, 2)


@pytest.mark.parametrize(
    ("target", "module", "extra"), [("gpu-h100-8", "xla_cuda", "cuda"), ("tpu-v5e-8", "libtpu", "tpu")]
)
def test_a_missing_compiler_is_an_error_that_says_what_to_install(monkeypatch, target, module, extra):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ax.ConfigError, match=rf"requires the extra aot-{extra}: pip install 'axcore\[aot-{extra}\]'"):
        Target.of(target).devices()


def test_the_report_of_a_training_step(one_device):
    cfg, report = one_device
    program = cfg.build().program(devices=jax.devices()[:1])
    expected = program.lower_train(batch_form(cfg.input)).compile().memory_analysis()
    memory = report.memory
    assert memory.arguments == expected.argument_size_in_bytes
    assert memory.temporaries == expected.temp_size_in_bytes
    assert memory.donated == expected.alias_size_in_bytes > 0.9 * memory.outputs
    sizes = [leaf.size for leaf in jax.tree.leaves(program.state.params)]
    assert report.parameters == report.parameters_per_device == sum(sizes)
    assert report.state_bytes["parameters"] == 4 * sum(sizes)
    assert report.fits and "fits: " in report.verdict and report.collectives == ()
    assert json.loads(report.to_json())["memory"]["total"] == memory.total


def test_flops_follow_from_the_parameters_and_the_attention(one_device):
    cfg, report = one_device
    model = cfg.model
    rows, seq = batch_form(cfg.input)["inputs"].shape
    weights = report.parameters - model.vocab_size * model.dim  # the embedding is looked up
    norms = sum(leaf.size for leaf in jax.tree.leaves(cfg.build().program().state.params) if leaf.ndim < 2)
    layers = cfg.model.decoder.num_layers if hasattr(cfg.model.decoder, "num_layers") else len(cfg.model.decoder.layers)
    attention = 3 * layers * 4 * rows * seq * seq * model.dim
    assert report.model_flops == pytest.approx(6 * (weights - norms) * rows * seq + attention, rel=0.02)
    assert report.model_flops <= sum(report.flops.values())


def test_a_program_that_does_not_fit(one_device, monkeypatch):
    report = dataclasses.replace(one_device[1], limit=1000)
    assert not report.fits and report.headroom == 1000 - report.memory.total
    assert report.verdict.startswith("does not fit: ")
    memory = Memory.of_out_of_memory(OutOfMemory("it", "Help it", OUT_OF_MEMORY), arguments=7)
    assert (memory.total, memory.arguments, memory.out_of_memory) == (int(18.62 * 2**40), 7, True)
    report = dataclasses.replace(report, memory=memory, limit=2**60, estimate=None, memory_traffic=None)
    assert not report.fits and "total, according to the compiler" in str(report)
    with pytest.raises(OutOfMemory, match=r"memory for it. Help it \(RESOURCE_EXHAUSTED: other\)"):
        Memory.of_out_of_memory(OutOfMemory("it", "Help it", "RESOURCE_EXHAUSTED: other"), arguments=7)


def test_the_command_exits_with_3_if_the_program_does_not_fit(axcore, one_device, monkeypatch, tmp_path):
    given = []

    def compiled(cfg, target, program, executable):
        given.append((target, program))
        return dataclasses.replace(one_device[1], limit=1000)

    monkeypatch.setattr("axcore.aot.compile_program", compiled)
    done = axcore("aot", "tiny", "--program", "decode", "--json", "r.json", "--html", "r.html")
    assert (done.code, given) == (3, [(None, "decode")])
    assert "does not fit" in done.out and "does not fit" in (tmp_path / "r.html").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["fits"] is False


@pytest.mark.long
def test_decoding_steps_have_a_cache(tiny):
    cfg = tiny.set(mesh=tiny.mesh.set(shape={"data": 1}))
    prefill, decode = (compile_program(cfg, "cpu-1", program) for program in ("prefill", "decode"))
    rows, seq = batch_form(cfg.input)["inputs"].shape
    assert (prefill.tokens, decode.tokens) == (rows * seq, rows)
    assert decode.state_bytes["cache"] == prefill.state_bytes["cache"] > 0
    assert decode.memory.donated >= decode.state_bytes["cache"]
    assert sum(decode.flops.values()) < sum(prefill.flops.values()) / 4


def _fsdp_report(cfg):
    mesh, rows = cfg.mesh.set(shape={"fsdp": 8}), cfg.input.set(batch_size=8)
    return compile_program(cfg.set(mesh=mesh, input=rows), "cpu-4x2")


@pytest.mark.long
def test_collectives_of_fsdp_on_two_hosts(tiny):
    report = on_devices(_fsdp_report, tiny)
    assert report.parameters_per_device == report.parameters / 8
    gathered = [each for each in report.collectives if each.kind == "all-gather"]
    assert {(each.axes, each.crosses_hosts) for each in gathered} == {(("fsdp",), True)}
    # Every parameter is gathered at least once, and a device receives the other seven parts.
    assert sum(each.sent for each in gathered) > 7 / 8 * 4 * report.parameters
    # Chunks of queries need no other device.
    chunked = on_devices(_fsdp_report, ax.select(tiny, ReferenceKernel).set(chunk=tiny.input.seq_len // 2))
    assert "collective-permute" not in {each.kind for each in chunked.collectives}


@pytest.mark.slow
@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.kind)
def test_every_chip_has_a_compiler(chip):
    module = "libtpu" if chip.platform == "tpu" else "jax_plugins.xla_cuda13"
    if not _installed(module):
        pytest.skip(f"{module} is not installed")
    count = 8
    target = Target.of(f"{chip.platform}-{chip.kind}-{count * (2 if chip.kind in ('v4', 'v5p') else 1)}")
    devices = target.devices()
    assert len(devices) == count and devices[0].device_kind == chip.device_kind
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=sharding)
    assert "all-gather" in jax.jit(lambda x: x @ x).lower(x).compile().as_text()


@pytest.mark.slow
def test_the_figure_of_an_out_of_memory_error_includes_the_arguments_and_outputs():
    if not _installed("libtpu"):
        pytest.skip("libtpu is not installed")
    sharding = jax.sharding.SingleDeviceSharding(Target.of("tpu-v5e-1").devices()[0])
    x = jax.ShapeDtypeStruct((2**16, 2**16), "bfloat16", sharding=sharding)  # 8 GiB
    with pytest.raises(OutOfMemory) as caught, allocating("it", "Help it"):
        jax.jit(lambda x: 2 * x).lower(x).compile()
    assert Memory.of_out_of_memory(caught.value, arguments=0).total == 16 * 2**30


def _installed(module):
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on PATH")
def test_the_page_shows_the_verdict_in_a_browser(one_device, tmp_path):
    page = pathlib.Path(tmp_path / "page.html")
    page.write_text(report_page(one_device[1], title="tiny on <cpu-1>"))
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run([*command, "--dump-dom", f"file://{page}"], capture_output=True, text=True, timeout=600)
    assert "fits: " in done.stdout and "tiny on &lt;cpu-1&gt;" in done.stdout and 'class="bar"' in done.stdout
