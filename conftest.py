"""What runs when, over all distributions.

`make test` leaves out what is `long` or `slow`, and takes five minutes; CI runs what is long, too; `make test-all` runs
everything.
"""

import pytest

WHOLE_BY_DAY = ("tests/testing/", "tests/parallel/")
AT_NIGHT = (
    "test_eight_devices_agree_with_one",  # a process that compiles twice
    "test_bfloat16_is_close_to_float32",
    "test_remat_does_not_change_results",
    "test_vmap_agrees_with_single_examples",
    "test_rows_of_a_batch_are_independent",
)
"""Checks of the conformance suites that compile a model once more: slow, but in a few folders."""

LONG = (
    "tests/authors/",
    "plugins/axcore-diff-attention/tests/test_diff_attention.py",
    "plugins/axcore-hf/tests/parity/test_parity.py",
    "plugins/axcore-lora/tests/test_conformance.py",
    "plugins/axcore-lora/tests/test_training.py",
    "plugins/axcore-mamba2/tests/test_conformance.py",
    "plugins/axcore-mamba2/tests/test_feature.py",
    "plugins/axcore-moe/tests/test_balance.py",
    "plugins/axcore-moe/tests/test_dispatch.py",
    "plugins/axcore-moe/tests/test_feature.py",
    "plugins/axcore-moe/tests/test_transformers.py",
    "plugins/axcore-rope/tests/test_conformance.py",
    "plugins/axcore-rope/tests/test_scaling.py",
    "plugins_kernels/axcore-cudnn/tests/test_packed.py",
    "tests/cli/test_cli.py",
    "tests/contracts/test_01_attention_call.py",
    "tests/contracts/test_02_kv_view.py",
    "tests/contracts/test_03_objective.py",
    "tests/contracts/test_04_grouped_linear.py",
    "tests/contracts/test_04_sharded_bodies.py",
    "tests/contracts/test_10_stacks.py",
    "tests/contracts/test_11_numerics.py",
    "tests/contracts/test_12_axes.py",
    "tests/infer/test_contiguous_cache.py",
    "tests/nn/test_causal_lm.py",
    "tests/nn/test_chunked_loss.py",
    "tests/nn/test_coordinates.py",
    "tests/nn/test_dropout.py",
    "tests/nn/test_eight_devices.py",
    "tests/nn/test_features.py",
    "tests/nn/test_kernel_suite.py",
    "tests/nn/test_latent_attention.py",
    "tests/nn/test_multi_token.py",
    "tests/nn/test_residuals.py",
    "tests/nn/test_stacks.py",
    "tests/nn/test_vocabulary.py",
    "tests/parallel/test_eight_devices.py",
    "tests/parallel/test_local_kernel.py",
    "tests/parallel/test_plugin_rule.py",
    "tests/parallel/test_shard_map.py",
    "tests/train/test_checkpoint.py",
    "tests/train/test_checkpoint_format.py",
    "tests/train/test_frozen.py",
    "tests/train/test_initial.py",
    "tests/train/test_resume.py",
    "tests/train/test_trainer.py",
)
"""Folders and files that take more than fifteen seconds."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is not asked for
def pytest_collection_modifyitems(config, items):
    for item in items:
        file = item.path.relative_to(config.rootpath).as_posix()
        if item.name in AT_NIGHT and not file.startswith(WHOLE_BY_DAY):
            item.add_marker(pytest.mark.slow)
        elif file.startswith(LONG):
            item.add_marker(pytest.mark.long)
