"""The rule for AWS Trainium. Nothing here was run on one."""

from __future__ import annotations

from axcore.config import has_field, walk
from axcore.nn import use_remat
from axcore.parallel import ByTag
from axcore.plugin import Accelerator
from axcore.train import Trainer


def trainium(cfg: Trainer.Config, accelerator: Accelerator) -> Trainer.Config:
    """FSDP over the cores of a host, which NeuronLink connects, and data parallelism over hosts. Each chip has several
    devices, so the size of fsdp is left open."""
    cfg = cfg.set(mesh=cfg.mesh.set(shape={"data": accelerator.hosts, "fsdp": -1}))
    if any(has_field(node, "remat") for _, node in walk(cfg.model)):
        cfg = cfg.set(model=use_remat(cfg.model, ByTag(save=("heads",))))
    return cfg
