"""Loads published weights on eight devices and compares shardings and values with those of one device."""

import os
import pathlib

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=600"
)

import jax
import numpy as np

from axcore.module import abstract
from axcore.parallel import Mesh
from axcore.train.checkpoint.model_folder import flat
from axcore_hf import importing
from axcore_hf.checkpoint import Checkpoint

RECORDED = pathlib.Path(__file__).parent / "parity" / "recorded"
# These rules also shard layers and experts, which are written one at a time.
RULES = {
    "layer": "fsdp",
    "expert": "fsdp",
    "embed": "fsdp",
    "mlp": "tensor",
    "head": "tensor",
    "kv_head": "tensor",
    "vocab": "tensor",
}


def main() -> None:
    assert len(jax.devices()) == 8
    layout = Mesh(shape={"fsdp": 2, "tensor": 4}, rules=RULES).make()
    for name in ("llama", "mixtral"):
        found = Checkpoint.open(f"hf:{RECORDED / name}")
        fn, params, _ = abstract(found.model)
        shardings = flat(layout.shardings(params, fn.axes))
        forms = {
            path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=shardings[path])
            for path, leaf in flat(params).items()
        }
        arrays = importing.load(found.family, found.model, found.source, found.model, forms, {})
        alone = importing.load(found.family, found.model, found.source, found.model, flat(params), {})
        assert arrays.keys() == alone.keys()
        for path, array in arrays.items():
            assert array.sharding == shardings[path], f"{path}: {array.sharding}, expected {shardings[path]}"
            np.testing.assert_array_equal(array, alone[path], err_msg=path)
        held = sum(array.addressable_shards[0].data.size for array in arrays.values())
        assert held < sum(array.size for array in arrays.values()) / 4
        print(name)


if __name__ == "__main__":
    main()
