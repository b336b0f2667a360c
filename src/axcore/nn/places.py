"""What a stack of layers is: a layer whose config says which layers it runs, and where their arrays are."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from axcore.module import Layer


@dataclasses.dataclass(frozen=True)
class Place:
    """Where one layer of a stack is.

    Attributes:
        path: of the layer's parameters, from the stack on; `layers` in a `Repeat`, `layers.3` in a `Sequence`.
        index: its index on the leading axes of those parameters: one for each axis over which layers are stacked.
        config: what it is built from.
        node: path of `config` in the config of the stack; None: the same as `path`.
    """

    path: str
    index: tuple[int, ...]
    config: Any
    node: str | None = None

    @property
    def config_path(self) -> str:
        """Path of `config` in the config of the stack."""
        return self.path if self.node is None else self.node


class Stack(Layer):
    """Base of the layers that run many layers in order.

    Its config implements `places` and `restack`. Then its layers have numbers (`layers_of`), features edit them by
    number (`edit_layers`), and weights move between it and any other stack of the same layers (`by_layer`). A layer of
    a stack may be a stack: `places` lists the direct layers only.

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
                    raise ax.ConfigError("the layers of Halves are alike")
                return self.set(block=layers[0], num_layers=len(layers))
    ```
    """

    class Config(Layer.Config):
        """Fields that every stack has."""

        is_sequential: ClassVar[bool] = False
        """Whether the stack computes what its layers compute one after another: `x = layer(x, *args)`. Decoding then
        runs them as a `Sequence`, each with arrays of its own. False: decoding runs the stack as it is."""

        def places(self) -> tuple[Place, ...]:
            """The direct layers, in the order in which they run.

            Raises:
                ConfigError: their number is REQUIRED.
            """
            raise NotImplementedError

        def restack(self, layers: tuple[Layer.Config, ...]) -> Layer.Config:
            """A stack in place of this one that runs these layers, with the other fields as they are.

            Args:
                layers: at least one; usually as many as `places` has, and some edited.

            Raises:
                ConfigError: no stack of this kind can run them.
            """
            raise NotImplementedError
