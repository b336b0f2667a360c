"""The base of attention kernels: softmax(q k^T) v under a mask."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from axcore.config import REQUIRED, ConfigError, PositiveInt
from axcore.module import Layer
from axcore.nn.attention.formula import gradients
from axcore.nn.attention.inputs import LSE, AttentionInputs, Heads
from axcore.nn.attention.request import OPTIONS, KernelRequest
from axcore.nn.kv.views import Contiguous, KVView
from axcore.nn.tuning import Settings, Tuning, tuned_settings


class AttentionKernel(Layer):
    """Base of the layers that fill the kernel slot of attention."""

    class Config(Layer.Config):
        head_dim: PositiveInt = REQUIRED

    takes: ClassVar[frozenset[str] | set[str]] = frozenset()
    """The options that the kernel supports: members of `softcap`, `sinks`, `bias`, `dropout` and `lse`. A call with
    another option is not passed to `supports`."""

    views: ClassVar[tuple[type[KVView], ...]] = (Contiguous,)
    """The views of keys and values that the kernel reads. Other views are first gathered into a `Contiguous`."""

    tags_heads: ClassVar[bool] = False
    """Whether the kernel itself tags its heads as `heads` for remat policies, which a custom gradient requires."""

    local: ClassVar[bool] = True
    """Whether the kernel runs under `shard_map`, on the rows, heads and queries of one device and all keys of those
    rows. False for a kernel that the compiler partitions, or that calls another kernel through `attend`."""

    def __init_subclass__(cls, **kwargs: bool) -> None:
        super().__init_subclass__(**kwargs)
        if not isinstance(cls.takes, set | frozenset) or not cls.takes <= set(OPTIONS):
            raise ConfigError(
                f"{cls.__name__}.takes must be a set of names from {', '.join(OPTIONS)}, not {cls.takes!r}"
            )
        if not isinstance(cls.views, tuple) or not all(isinstance(each, type) for each in cls.views):
            raise ConfigError(f"{cls.__name__}.views must be a tuple of view classes, not {cls.views!r}")

    def supports(self, request: KernelRequest) -> str | None:
        """None if the kernel supports the request, otherwise the reason, such as "requires a GPU"."""
        return None

    def __call__(self, inputs: AttentionInputs) -> tuple[Heads, LSE | None]:
        """Computes the heads.

        Returns:
            heads: [batch, query, head, value_dim] in the dtype of q; undefined for a query that sees no key.
            lse: float32 [batch, query, head], the log-sum-exp of each query's logits, sinks included; None unless
                `inputs.return_lse`. It carries no gradient.
        """
        raise NotImplementedError

    def backward(self, inputs: AttentionInputs, heads: Heads, lse: LSE, heads_grad: Heads) -> AttentionInputs:
        """Gradients of a call on a subset of the keys, whose result was merged with those of other subsets.

        The default recomputes the logits by the formula. A fused kernel overrides this method.

        Args:
            inputs: the inputs of this call.
            heads, lse: the merged results, over all keys and sinks.
            heads_grad: the gradient of the merged `heads`.

        Returns:
            `inputs` with each array replaced by its gradient, or by None if it has none. `kv` is a `Contiguous`.
        """
        return gradients(inputs, heads, lse, heads_grad)


class TunableKernel(AttentionKernel):
    """Base of kernels whose block sizes `axcore tune` measures.

    The Config has a field for each setting, None by default. The kernel calls `settings` for the values of a call.
    """

    class Config(AttentionKernel.Config):
        tuning: Tuning | None = None
        """Measured settings; None: the defaults of the kernel."""

    config: Config

    def candidates(self, request: KernelRequest) -> Iterable[Settings]:
        """The settings that are worth measuring for a request that the kernel supports. The first are its defaults,
        which may depend on `request.device_kind`."""
        raise NotImplementedError

    def settings(self, request: KernelRequest) -> dict[str, int]:
        """The settings of a call; see `tuned_settings`."""
        return tuned_settings(self.config, self.config.tuning, request, self.candidates(request))


def refusal(kernel: AttentionKernel, *requests: KernelRequest) -> str | None:
    """Why the kernel does not support one of the requests: an option outside `takes`, or the reason that `supports`
    returns. None if the kernel supports all of them.

    Raises:
        ConfigError: `supports` raised.
    """
    for request in requests:
        unknown = [name for name in request.options if name not in kernel.takes]
        if unknown:
            return f"does not take {' and '.join(unknown)}"
        try:
            reason = kernel.supports(request)
        except Exception as error:
            raise ConfigError(f"{type(kernel).__name__}.supports raised {type(error).__name__}: {error}") from error
        if reason is not None and not (isinstance(reason, str) and reason):
            raise ConfigError(f"{type(kernel).__name__}.supports must return None or a reason, not {reason!r}")
        if reason is not None:
            return reason
    return None


def checked(kernel: AttentionKernel, path: str, inputs: AttentionInputs, result: object) -> tuple[Heads, LSE | None]:
    """The result of a kernel, checked.

    Raises:
        ConfigError: `result` is not `(heads, lse)` with the required shapes and dtypes.
    """
    shape, q = (*inputs.q.shape[:3], inputs.keys.value_dim), inputs.q
    wanted = f"heads {shape} in {q.dtype}, and " + (f"a float32 lse {shape[:3]}" if inputs.return_lse else "None")
    if isinstance(result, tuple) and len(result) == 2:
        heads, lse = result
        lse_fits = _is_array(lse, shape[:3], jnp.float32) if inputs.return_lse else lse is None
        if lse_fits and _is_array(heads, shape, q.dtype):
            return heads, lse
    found = jax.tree.map(lambda x: getattr(x, "aval", x), result)
    raise ConfigError(f"{path}: {type(kernel).__name__} must return ({wanted}), not {found}")


def _is_array(x: object, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    return getattr(x, "shape", None) == shape and getattr(x, "dtype", None) == dtype
