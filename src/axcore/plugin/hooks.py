"""The hook specs: the functions that a plugin module may implement, by family.

A plugin is a module that an entry point of the group `axcore.plugins` names. It imports neither jax nor flax, marks the
hooks that it implements with `hookimpl`, and describes what it offers; the heavy code is imported when a config names
it. Each hook is called once, at discovery.

```python
from axcore.plugin import Feature, hookimpl

axcore_api = 2

@hookimpl
def axcore_features():
    return [Feature("rope", "axcore_rope.feature:use_rope", "Rotary position embedding.")]
```

What may change between releases, and what may not:

- An implementation may take fewer arguments than its spec, so a spec can gain one and no plugin breaks.
- An argument on its way out is marked with `warn_on_impl_args`, a hook with `warn_on_impl`; a plugin that still has it
  is loaded, and `axcore plugins NAME` and `axcore doctor` show the warning.
- What an argument means, or what a hook must return, changes only together with `API_VERSION`.
- A hook of a newer axcore may be implemented already, marked `hookimpl(optionalhook=True)`.
"""

from __future__ import annotations

import pluggy

from axcore.plugin.host import Host
from axcore.plugin.offers import (
    AttentionKernel,
    CheckpointFormat,
    Command,
    Feature,
    InputSource,
    KVCache,
    MeshRule,
    NumericsOffer,
    Offer,
    Optimizer,
    Recipe,
)

API_VERSION = 2
"""The version of these specs, apart from the package's. A plugin module may state the one it needs as `axcore_api`."""

SUPPORTED_APIS = (2,)
"""What a plugin may state and still be loaded."""

PROJECT = "axcore"
hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class LayerHooks:
    """Layer types and the features that attach them."""

    @hookspec
    def axcore_features(self, host: Host) -> list[Feature]:  # type: ignore[empty-body]
        """Named modifiers for `axcore.use(name, **options)`.

        The target is a function `(cfg, **options) -> cfg`. Options that it does not have are refused with its
        signature in hand, and text from `--use` is read by its annotations.

        ```python
        @hookimpl
        def axcore_features(host: Host) -> list[Feature]:
            return [Feature("rope", "axcore_rope.feature:use_rope", "Rotary position embedding in every attention.")]
        ```
        """


class AttentionHooks:
    """How attention is computed."""

    @hookspec
    def axcore_attention_kernels(self, host: Host) -> list[AttentionKernel]:  # type: ignore[empty-body]
        """Layers for the kernel slot of attention. `axcore.use(name)` puts one into every attention.

        The target is a subclass of `axcore.nn.AttentionKernel`. What it can compute it says when it is asked, in
        `supports`; whether it can run here at all may be said here, by offering it or not.

        ```python
        @hookimpl
        def axcore_attention_kernels(host: Host) -> list[AttentionKernel]:
            if host.platform != "linux":
                return []
            return [AttentionKernel("cudnn", "axcore_cudnn.kernel:CudnnKernel", "cuDNN flash attention.")]
        ```
        """


class KVCacheHooks:
    """How keys and values are kept while decoding."""

    @hookspec
    def axcore_kv_caches(self, host: Host) -> list[KVCache]:  # type: ignore[empty-body]
        """Layers for the cache slot of attention. `axcore.use(name)` puts one into every attention.

        The target is a subclass of `axcore.nn.KVCache`.

        ```python
        @hookimpl
        def axcore_kv_caches(host: Host) -> list[KVCache]:
            return [KVCache("paged", "axcore_paged_kv.cache:PagedCache", "Keys and values in pages of a fixed size.")]
        ```
        """


class ParallelismHooks:
    """How a config is laid out on hardware."""

    @hookspec
    def axcore_mesh_rules(self, host: Host) -> list[MeshRule]:  # type: ignore[empty-body]
        """Modifiers by accelerator, for `axcore.target(accelerator)`.

        The target is a function `(cfg) -> cfg` or `(cfg, accelerator) -> cfg`. Among the rules that match, the one
        with the most specific pattern is taken.

        ```python
        @hookimpl
        def axcore_mesh_rules(host: Host) -> list[MeshRule]:
            return [MeshRule("h100", "site.rules:h100", "FSDP over all GPUs.", pattern="gpu-h100-*")]
        ```
        """


class NumericsHooks:
    """Number formats of weights and products."""

    @hookspec
    def axcore_numerics(self, host: Host) -> list[NumericsOffer]:  # type: ignore[empty-body]
        """Representations of weights and products with them. `axcore.use(name)` gives one to every layer with a weight.

        The target is a subclass of `axcore.numerics.Numerics`.

        ```python
        @hookimpl
        def axcore_numerics(host: Host) -> list[NumericsOffer]:
            return [NumericsOffer("int8", "axcore_int8.numerics:Int8", "Weights and activations in 8 bits.")]
        ```
        """


class TrainingHooks:
    """What a training run reads, writes and updates with."""

    @hookspec
    def axcore_optimizers(self, host: Host) -> list[Optimizer]:  # type: ignore[empty-body]
        """Optimizers for the learner; `axcore.use(name)` puts one in.

        The target is a subclass of `axcore.train.Optimizer`.

        ```python
        @hookimpl
        def axcore_optimizers(host: Host) -> list[Optimizer]:
            return [Optimizer("muon", "axcore_muon.muon:Muon", "Orthogonalised momentum for matrices.")]
        ```
        """

    @hookspec
    def axcore_input_sources(self, host: Host) -> list[InputSource]:  # type: ignore[empty-body]
        """Sources of documents for the input; `axcore.use(name, **options)` puts one in.

        The target is a subclass of `axcore.train.data.TextSource`.

        ```python
        @hookimpl
        def axcore_input_sources(host: Host) -> list[InputSource]:
            return [InputSource("jsonl", "site.sources:JsonLines", "One document a line, from a field of an object.")]
        ```
        """

    @hookspec
    def axcore_checkpoint_formats(self, host: Host) -> list[CheckpointFormat]:  # type: ignore[empty-body]
        """Ways to write a training state down; `axcore.use(name)` puts one in.

        ```python
        @hookimpl
        def axcore_checkpoint_formats(host: Host) -> list[CheckpointFormat]:
            return [CheckpointFormat("safetensors", "site.files:SafeTensors", "One .safetensors file per process.")]
        ```
        """


class ProgramHooks:
    """What people run."""

    @hookspec
    def axcore_recipes(self, host: Host) -> list[Recipe]:  # type: ignore[empty-body]
        """Whole configs, by name, for `axcore.recipe(name)` and `axcore train NAME`.

        The target is a function without required arguments that returns a config.

        ```python
        @hookimpl
        def axcore_recipes(host: Host) -> list[Recipe]:
            return [Recipe("quickstart", "axcore_recipes.quickstart:quickstart", "A small Llama on Python's source.")]
        ```
        """

    @hookspec
    def axcore_commands(self, host: Host) -> list[Command]:  # type: ignore[empty-body]
        """Subcommands of the `axcore` command.

        The target is a function `(arguments: list[str]) -> int` that returns the exit code.

        ```python
        @hookimpl
        def axcore_commands(host: Host) -> list[Command]:
            return [Command("loc", "axcore_loc.cli:main", "Measure what a feature costs in lines.")]
        ```
        """


OFFERS: dict[str, type[Offer]] = {
    "axcore_features": Feature,
    "axcore_attention_kernels": AttentionKernel,
    "axcore_kv_caches": KVCache,
    "axcore_mesh_rules": MeshRule,
    "axcore_numerics": NumericsOffer,
    "axcore_optimizers": Optimizer,
    "axcore_input_sources": InputSource,
    "axcore_checkpoint_formats": CheckpointFormat,
    "axcore_recipes": Recipe,
    "axcore_commands": Command,
}
"""What each hook returns a list of."""

FAMILIES: tuple[type, ...] = (
    LayerHooks,
    AttentionHooks,
    KVCacheHooks,
    ParallelismHooks,
    NumericsHooks,
    TrainingHooks,
    ProgramHooks,
)
