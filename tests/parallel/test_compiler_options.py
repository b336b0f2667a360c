"""Compiler options are checked before a step is compiled with them."""

import dataclasses
import warnings

import jax
import pytest

import axcore as ax
from axcore.config import ConfigError
from axcore.parallel import Mesh, check_options, checked_options, compiler_options
from axcore.parallel.compiler_options import REMOVED, RENAMED, SUGGESTED
from axcore.train.data.form import batch_form
from axcore.train.step.program import Program

THRESHOLD = "xla_gpu_all_gather_combine_threshold_bytes"


def layout():
    return Mesh().make(jax.devices()[:1])


def test_the_compiler_accepts_valid_options_unchanged():
    options = {THRESHOLD: 2**29, "xla_gpu_enable_triton_gemm": False, "xla_disable_hlo_passes": "a,b"}
    with warnings.catch_warnings(action="error"):
        assert checked_options(options, layout()) == options


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"xla_gpu_enable_triton_gem": True}, r"triton_gem: .* no such option .*'cpu'.*'xla_gpu_enable_triton_gemm'"),
        ({THRESHOLD: "many"}, rf"compiler_options\.{THRESHOLD}: .*'many'.* is not a valid int64 value"),
        ({THRESHOLD: True}, "does not accept the value True"),
        ({"xla_gpu_enable_triton_gemm": "yes"}, "is not a valid bool"),
        ({"xla_gpu_pipeline_all_gather": "maybe"}, "is not a valid enum"),
        ({"optimization_level": 1}, "1 is not a valid CompilerEffortLevel"),
        ({"xla_tpu_scoped_vmem_limit_kib": 1}, "an option for TPUs, but the platform is 'cpu'"),
        ({"xla_gpu_enable_async_collectives": True}, "asynchronous by default. Remove it"),
        ({"xla_gpu_enable_pipelined_all_gather": True, "xla_gpu_pipeline_all_gather": "on"}, "is also set. Remove one"),
        ({"--xla_dump_to": "x"}, "no such option"),
    ],
)
def test_an_option_that_the_compiler_lacks_raises(options, message):
    with pytest.raises(ConfigError, match=message):
        check_options(options, layout())


def test_a_renamed_option_is_translated_with_a_warning():
    options = {"xla_gpu_enable_pipelined_all_gather": True, "xla_gpu_pipeline_all_reduce": "off"}
    with pytest.warns(UserWarning, match="pipelined_all_gather: this option is now xla_gpu_pipeline_all_gather="):
        found = checked_options(options, layout())
    assert found == {
        "xla_gpu_pipeline_all_gather": "COLLECTIVE_PIPELINING_MODE_ON",
        "xla_gpu_pipeline_all_reduce": "COLLECTIVE_PIPELINING_MODE_OFF",
    }


def test_the_tables_agree_with_the_installed_jaxlib():
    """If this fails after an upgrade, an option was renamed or removed again."""
    for name in (*RENAMED, *REMOVED):
        assert "No such compile option" in refusal(name, True), name
    for name in RENAMED.values():
        assert not check_options({name: True}, layout())[0].note.startswith("not checked")
    for name in SUGGESTED:
        if name.startswith("xla_gpu"):
            wrong = 3 if name.endswith("_dir") else "no such value"
            assert "is not a valid" in refusal(name, wrong), name


def refusal(name, value):
    return compiler_options._refusal(name, value, jax.devices()[0])


def test_without_devices_options_of_gpus_are_checked_and_those_of_tpus_are_not():
    gpu = Mesh().abstract(8, "gpu", "NVIDIA H100")
    assert [option.checked for option in check_options({THRESHOLD: 1}, gpu)] == [True]
    with pytest.raises(ConfigError, match="no such option"):
        check_options({"xla_gpu_none": 1}, gpu)
    (option,) = check_options({"xla_tpu_any": 1}, Mesh().abstract(8, "tpu", "TPU v5"))
    assert not option.checked
    assert option.note == "not checked: no tpu compiler here"


@pytest.mark.long
def test_both_steps_are_compiled_with_the_options_of_the_trainer(tiny, monkeypatch):
    cfg = ax.override(tiny, ["compiler_options.xla_backend_optimization_level=0"])
    program, batch = cfg.build().program(), batch_form(cfg.input)
    assert program.compiler_options == {"xla_backend_optimization_level": 0}
    given = []

    @dataclasses.dataclass
    class Lowered:
        def compile(self, options):
            given.append(options)

    monkeypatch.setattr(Program, "lower_train", lambda *_: Lowered())
    monkeypatch.setattr(jax.stages.Lowered, "compile", lambda _, options: given.append(options))
    program.compile_train(batch), program.compile_eval(batch)
    assert given == [{"xla_backend_optimization_level": 0}] * 2


def test_an_invalid_option_raises_before_the_run_folder_is_created(tiny, tmp_path):
    cfg = tiny.set(compiler_options={"xla_gpu_enable_triton_gem": True})
    with pytest.raises(ConfigError, match="Did you mean 'xla_gpu_enable_triton_gemm'"):
        ax.fit(cfg, tmp_path / "run")
    assert not (tmp_path / "run").exists()
