"""What axcore-mesh-rules offers. Imports neither jax nor flax."""

from axcore.plugin import MeshRule, hookimpl

axcore_api = 2
GPUS = {"a100": "A100", "h100": "H100", "h200": "H200", "b200": "B200"}
TPUS = ("v4", "v5e", "v5p", "v6e", "7x")


@hookimpl
def axcore_mesh_rules() -> list[MeshRule]:
    package = "axcore_mesh_rules"
    gpu, tpu, hybrid = f"{package}.nvidia:gpu", f"{package}.tpu:tpu", f"{package}.fit:hybrid_sharding"
    fitted = "with remat, microbatches and compiler options for its memory and links"
    trainium = "FSDP over the chips of a host, data parallelism over hosts, remat."
    return [
        MeshRule("cpu", hybrid, "FSDP over the devices of a host, data parallelism over hosts.", "cpu-*"),
        MeshRule("gpu", hybrid, "FSDP over the GPUs of a host, data parallelism over hosts.", "gpu-*"),
        *(
            MeshRule(f"gpu-{kind}", gpu, f"NVIDIA {name}: FSDP {fitted}.", f"gpu-{kind}-*")
            for kind, name in GPUS.items()
        ),
        MeshRule("tpu", hybrid, "FSDP over a slice, data parallelism over slices.", "tpu-*"),
        *(MeshRule(f"tpu-{kind}", tpu, f"TPU {kind}: FSDP {fitted}.", f"tpu-{kind}-*") for kind in TPUS),
        MeshRule("trn1", f"{package}.trainium:trainium", trainium, "trn1-*"),
        MeshRule("trn2", f"{package}.trainium:trainium", f"{trainium[:-1]}, NKI attention.", "trn2-*"),
    ]
