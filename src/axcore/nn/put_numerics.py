"""Fills and empties the slots `numerics` of a model."""

from __future__ import annotations

import jax.numpy as jnp

from axcore.config import Config, ConfigError, Where, has_field, select, walk
from axcore.config.tree import REMOVED, transform
from axcore.nn.grouped_linear import GroupedLinear
from axcore.nn.layer_stack import Stack
from axcore.nn.linear import Linear
from axcore.nn.stacks import edit_layers, layers_of
from axcore.numerics import Numerics


def put_numerics[C: Config](cfg: C, numerics: Numerics.Config, where: Where | None = None) -> C:
    """A copy of `cfg` with `numerics` in the slot of every selected layer.

    By default, these are the linear maps (attention projections, feed-forward blocks, experts) in all layers of the
    decoder except the first and the last, whose products are the most sensitive to rounding. Embeddings, the head,
    multi-token prediction and linear maps that require float32, such as routers, keep their number format.

    A stack whose first and last layer differ from the others is rebuilt with `Stack.Config.restack`: a `Repeat` becomes
    a `Sequence` of its first layer, a `Repeat` of the inner layers, and its last layer. The paths of parameters change,
    as from `decoder.layers` to `decoder.layers.0`, `decoder.layers.1.layers` and `decoder.layers.2`, so attach numerics
    before other edits by path. Weights are still loaded from checkpoints of the model with the stack as it was, since
    layers are matched by number. Pipeline stages divide the inner layers only.

    Args:
        cfg: config of a model, or of a trainer.
        numerics: the value of the slot. Wrappers stay.
        where: selects nodes; those without a slot `numerics` are skipped, and no stack is rebuilt. For example,
            `"model.decoder.layers.**"` selects all layers, and `axcore.nn.Weighted` also embedding, head and routers.
            None: the default above.

    Raises:
        ConfigError: the selected nodes have no such slot; the model has no stack of layers; a stack has fewer than
            three layers; or a stack cannot run layers that differ.
    """
    for path, node in walk(cfg):
        if isinstance(node, Numerics.Config) and node.stored:
            raise ConfigError(
                f"{path} is {type(node).__qualname__} with stored weights, whose number format cannot change. Start "
                f"from the model with float weights"
            )
    if where is None:
        return _in_inner_layers(cfg, numerics)
    chosen = {path for path, node in select(cfg, where) if has_field(node, "numerics")}
    if not chosen:
        raise ConfigError(
            f"no node that where={where!r} selects has a slot 'numerics'; select Linear or Embedding nodes"
        )
    return select(cfg, lambda path, _: path in chosen).put(numerics=numerics)


def without_numerics[C: Config](cfg: C) -> C:
    """The config with empty slots in place of numerics whose weights are floats, as after training.

    Parameters keep their names (see `by_layer`). Numerics with stored weights stay.
    """

    def emptied(_: str, node: Config) -> object:
        return REMOVED if isinstance(node, Numerics.Config) and not node.stored else node

    new: C = transform(cfg, emptied)
    return new


def _in_inner_layers[C: Config](cfg: C, numerics: Numerics.Config) -> C:
    stacks: dict[str, Stack.Config] = {}
    for path, node in walk(cfg):
        if isinstance(node, Stack.Config) and not any(not above or path.startswith(f"{above}.") for above in stacks):
            stacks[path] = node
    if not stacks:
        raise ConfigError("the config has no stack of layers, such as a Repeat; select the linear maps with where=")
    made = select(cfg, lambda path, _: path in stacks).map(lambda path, stack: _edited(path, stack, numerics))
    inner = [place.config for stack in stacks.values() for place in layers_of(stack)[1:-1]]
    if not any(_is_linear(node) for layer in inner for _, node in walk(layer)):
        raise ConfigError(
            "the inner layers have no linear map whose number format can change; select layers with where="
        )
    return made


def _edited(path: str, stack: Config, numerics: Numerics.Config) -> Config:
    assert isinstance(stack, Stack.Config)
    places = layers_of(stack)
    if len(places) < 3:
        raise ConfigError(
            f"the first and the last layer keep their number format, so numerics require at least 3 layers, not "
            f"{len(places)}. To apply them to every layer, pass where={f'{path}.**'.lstrip('.')!r}"
        )
    layers = {place.config_path for place in places}
    last = len(places) - 1

    def edit(_: str, layer: Config, number: int) -> Config:
        linear = {path for path, node in walk(layer) if _is_linear(node)}
        if number in (0, last) or not linear:
            return layer
        return select(layer, lambda path, _: path in linear).put(numerics=numerics)

    return edit_layers(stack, lambda path, _: path in layers, edit)


def _is_linear(node: Config) -> bool:
    """Whether a node is a linear map that does not require float32."""
    if not isinstance(node, Linear.Config | GroupedLinear.Config):
        return False
    return node.dtypes is None or node.dtypes.compute != jnp.float32
