"""The base of what plugins offer for adapters that the rows of one batch choose from."""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any

from axcore.config import Config as BaseConfig, Configurable, PositiveInt

if TYPE_CHECKING:
    from jaxtyping import Array, Int

    from axcore.module import Tree


class Adapters(Configurable, abc.ABC):
    """Base of the implementations of adapters per request, such as LoRA.

    The decoding model has room for `max_adapters` adapters, its slots. They are state of the model, so loading an
    adapter changes arrays and compiles nothing. The slot of each token is shared as `axcore.nn.ADAPTERS`.
    """

    class Config(BaseConfig):
        max_adapters: PositiveInt = 4
        """The largest number of adapters that are loaded at the same time. Each costs memory in every adapted layer,
        and time in every step."""

    config: Config

    def __init__(self, cfg: Config):
        self.config = cfg

    @abc.abstractmethod
    def attach[C: BaseConfig](self, cfg: C) -> C:
        """The model with room for adapters.

        Args:
            cfg: config of the model, after `axcore.nn.unstacked`.

        Raises:
            ConfigError: the model has no layer for adapters.
        """

    @abc.abstractmethod
    def arrays(self, source: Any, model: BaseConfig, state: Tree) -> Tree:  # Any: what the implementation loads from
        """Loads an adapter, in the form that `write` takes. The shapes do not depend on the adapter.

        Args:
            source: a folder or an adapter in memory.
            model: config of the model, before `attach`. Its layers may be stacked.
            state: shapes of the state of the decoding model.

        Raises:
            AxcoreError: `source` is not an adapter, or does not fit the model.
        """

    @abc.abstractmethod
    def empty(self, state: Tree) -> Tree:
        """The arrays of an adapter that changes nothing, with which `Engine.warm_up` compiles `write`.

        Args:
            state: shapes of the state of the decoding model.
        """

    @abc.abstractmethod
    def identity(self, arrays: Tree) -> str:
        """A hash of all values of an adapter, so that an engine continues only prompts of the same adapter. It does not
        depend on the slots and the largest rank of the engine.

        Args:
            arrays: as returned by `arrays`.
        """

    @abc.abstractmethod
    def write(self, state: Tree, arrays: Tree, slot: Int[Array, ""]) -> Tree:
        """Puts an adapter into a slot. The function is jitted, and the state is donated.

        Args:
            state: the state of the decoding model.
            arrays: as returned by `arrays`.
            slot: the slot; nothing is written if it is out of range.

        Returns:
            The new state.
        """
