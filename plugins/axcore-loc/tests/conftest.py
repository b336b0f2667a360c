"""A plugin with faulty features, and a measurement that all tests share."""

import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import pytest

from axcore.plugin import registry

PLUGIN = """
from axcore.plugin import Feature, hookimpl

@hookimpl
def axcore_features():
    names = ("some", "unused", "patching", "picky", "late", "broken", "right")
    return [Feature(name, f"wrong.features:use_{name}", name) for name in names]
"""

FEATURES = '''
import jax
import axcore as ax
from axcore.nn import Attention, Linear, Zeros

class Scale(ax.Layer):
    """heads * scale."""

    class Config(ax.Layer.Config):
        head_dim: int = ax.REQUIRED
        used: bool = True
        num_kv_heads: int | None = None
        only_heads: int | None = None
        broken: bool = False

    def __init__(self, cfg, *, rngs):
        if cfg.only_heads not in (None, cfg.num_kv_heads):
            raise ax.ConfigError(f"only {cfg.only_heads} key heads")
        if cfg.broken:
            raise RuntimeError("broken")
        self.scale = self.param("scale", (cfg.head_dim,), Zeros(), rngs, axes=(None,))

    def __call__(self, x, heads):
        return heads * (self.scale[...] if self.config.used else 2.0)

def use_right(cfg):
    return ax.select(cfg, Attention).set(output=Scale.Config())

def use_some(cfg):
    """Skips attentions with fewer key heads."""
    few = [path for path, node in ax.select(cfg, Attention) if node.num_kv_heads is not None]
    return cfg if few else use_right(cfg)

def use_unused(cfg):
    return ax.select(cfg, Attention).set(output=Scale.Config(used=False))

def use_picky(cfg):
    if any(node.num_kv_heads for _, node in ax.select(cfg, Attention)):
        raise ax.ConfigError("only multi-head attention")
    return use_right(cfg)

def use_late(cfg):
    """Raises when it is built."""
    return ax.select(cfg, Attention).set(output=Scale.Config(only_heads=4))

def use_broken(cfg):
    return ax.select(cfg, Attention).set(output=Scale.Config(broken=True))

def use_patching(cfg):
    """Patches a function of the core at run time, without editing a source."""
    Linear.__call__ = lambda self, x: 2 * x @ self.weight[...]
    return use_right(cfg)
'''


@pytest.fixture(scope="session")
def wrong(tmp_path_factory):
    """Installs the plugin."""
    folder = tmp_path_factory.mktemp("wrong")
    (folder / "wrong").mkdir()
    (folder / "wrong" / "__init__.py").write_text("")
    (folder / "wrong" / "plugin.py").write_text(PLUGIN)
    (folder / "wrong" / "features.py").write_text(FEATURES)
    (folder / "wrong-1.0.dist-info").mkdir()
    (folder / "wrong-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (folder / "wrong-1.0.dist-info" / "entry_points.txt").write_text("[axcore.plugins]\nwrong = wrong.plugin\n")
    sys.path.insert(0, str(folder))
    registry.cache_clear()
    yield folder
    sys.path.remove(str(folder))
    registry.cache_clear()


@pytest.fixture(scope="session")
def rope():
    """A measurement of RoPE over two models and two attentions: all proven by shapes, one by numbers."""
    from axcore_loc import evidence, measure

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(evidence, "some", lambda pairs: pairs[-1:])  # a compilation takes seconds
        return measure.measure("rope:theta=500.0", 2, 2, lambda line: None)
