"""The protocol of layer stacks: the config of a stack lists its layers and the paths of their arrays."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from axcore.module import Layer


@dataclasses.dataclass(frozen=True)
class Place:
    """The place of one layer in a stack.

    Attributes:
        path: path of the layer's parameters, relative to the stack: `layers` in a `Repeat`, `layers.3` in a `Sequence`.
        index: index of the layer on the leading (stacked) axes of those parameters.
        config: config of the layer.
        node: path of `config` in the config of the stack; None: the same as `path`.
    """

    path: str
    index: tuple[int, ...]
    config: Layer.Config
    node: str | None = None

    @property
    def config_path(self) -> str:
        """Path of `config` in the config of the stack."""
        return self.path if self.node is None else self.node


class Stack(Layer):
    """Base of the layers that run other layers in order.

    The config implements `places` and `restack`. `layers_of` uses them to number the layers, `edit_layers` to edit
    layers by number, and `by_layer` to load weights from another stack of the same layers. A stack may contain stacks;
    `places` lists its direct layers only.

    ```python
    class Halves(Stack):
        class Config(Stack.Config):
            input_dim: int = ax.REQUIRED
            num_layers: int = ax.REQUIRED
            block: Layer.Config = TransformerLayer.Config()

            def places(self):
                half = self.num_layers // 2
                halves = [("lower", i) for i in range(half)] + [("upper", i) for i in range(half)]
                return tuple(Place(name, (i,), self.block, node="block") for name, i in halves)

            def restack(self, layers):
                if any(layer != layers[0] for layer in layers):
                    raise ax.ConfigError("the layers of Halves must be equal")
                return self.set(block=layers[0], num_layers=len(layers))
    ```
    """

    class Config(Layer.Config):
        """The interface that every stack implements."""

        is_sequential: ClassVar[bool] = False
        """Whether the stack only applies its layers in order: `x = layer(x, *args)`. If so, decoding replaces it by a
        `Sequence`, in which each layer has its own arrays; otherwise decoding runs the stack unchanged."""

        def places(self) -> tuple[Place, ...]:
            """The direct layers, in execution order.

            Raises:
                ConfigError: the number of layers is REQUIRED.
            """
            raise NotImplementedError

        def restack(self, layers: tuple[Layer.Config, ...]) -> Layer.Config:
            """A replacement for this stack that runs these layers and keeps the other fields.

            Args:
                layers: at least one; usually those of `places`, some of them edited.

            Raises:
                ConfigError: no stack of this kind can run these layers.
            """
            raise NotImplementedError
