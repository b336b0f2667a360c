"""Offers: what a plugin provides, described by a name, a target and a summary. An offer imports nothing."""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from typing import ClassVar

from axcore.plugin.accelerators import Accelerator


@dataclasses.dataclass(frozen=True)
class Offer:
    """One thing that a plugin provides. Each kind of offer is a subclass, and has a hook that returns a list of offers.

    Attributes:
        name: its name in configs and on the command line; unique among offers of its kind.
        target: `package.module:attribute`, imported when a config names the offer.
        summary: one line for listings.
    """

    hook: ClassVar[str] = ""
    kind: ClassVar[str] = ""
    slot: ClassVar[str] = ""
    """The config field that `axcore.use` fills; empty for kinds that fill none."""
    keyed: ClassVar[bool] = False
    """Whether the slot is a mapping. `axcore.use` then adds an entry under the name of the offer."""
    usage: ClassVar[str] = 'use("{name}")'
    """The call that attaches an offer, for listings."""
    name: str
    target: str
    summary: str


class Feature(Offer):
    """A function `(cfg, **options) -> cfg` that attaches something to a config: RoPE, MoE, LoRA, FP8."""

    hook, kind = "axcore_features", "feature"


class AttentionKernelOffer(Offer):
    """A subclass of `axcore.nn.AttentionKernel`, for the slot `kernel` of attention."""

    hook, kind, slot = "axcore_attention_kernels", "attention kernel", "kernel"


class KVCacheOffer(Offer):
    """A subclass of `axcore.nn.KVCache`, for the slot `cache` of attention."""

    hook, kind, slot = "axcore_kv_caches", "kv cache", "cache"


class DrafterOffer(Offer):
    """A subclass of `axcore.infer.speculation.Drafter`, for the slot `speculation` of an engine."""

    hook, kind, slot = "axcore_drafters", "drafter", "speculation"
    usage = "axcore generate --speculation {name}"


class AdaptersOffer(Offer):
    """A subclass of `axcore.infer.Adapters`, for the field `adapters` of an engine."""

    hook, kind = "axcore_adapters", "adapters"
    usage = "axcore serve --adapters {name}"


class GrammarCompilerOffer(Offer):
    """A subclass of `axcore.infer.GrammarCompiler`, for the slot `grammars` of an engine."""

    hook, kind, slot = "axcore_grammar_compilers", "grammar compiler", "grammars"
    usage = "axcore serve --grammars {name}"


class NumericsOffer(Offer):
    """A subclass of `axcore.numerics.Numerics`, for the slot `numerics` of layers with a weight."""

    hook, kind, slot = "axcore_numerics", "numerics", "numerics"


class GroupedMatmulOffer(Offer):
    """A subclass of `axcore.nn.GroupedMatmul`, for the slot `matmul` of the dispatch of a mixture of experts."""

    hook, kind, slot = "axcore_grouped_matmuls", "grouped matmul", "matmul"


class ContextParallelismOffer(Offer):
    """A subclass of `axcore.parallel.ContextParallelism`, for the slot `context` of the mesh."""

    hook, kind, slot = "axcore_context_parallelism", "context parallelism", "context"
    usage = 'use("context", size=2, strategy="{name}")'


class PipelineScheduleOffer(Offer):
    """A subclass of `axcore.parallel.PipelineSchedule`, for the slot `pipeline` of the mesh."""

    hook, kind, slot = "axcore_pipeline_schedules", "pipeline schedule", "pipeline"
    usage = 'use("pipeline", size=2, schedule="{name}")'


class OptimizerOffer(Offer):
    """A subclass of `axcore.train.Optimizer`, for the slot `optimizer` of the learner."""

    hook, kind, slot = "axcore_optimizers", "optimizer", "optimizer"


class SourceOffer(Offer):
    """A class that reads documents, for the slot `source` of an input."""

    hook, kind, slot = "axcore_input_sources", "input source", "source"


class CallbackOffer(Offer):
    """A subclass of `axcore.train.Callback`, for the mapping `callbacks` of the trainer."""

    hook, kind, slot, keyed = "axcore_callbacks", "callback", "callbacks", True


class EvaluatorOffer(Offer):
    """A subclass of `axcore.train.Evaluator`, for the mapping `evaluators` of the callback `Evaluation`."""

    hook, kind, slot, keyed = "axcore_evaluators", "evaluator", "evaluators", True


@dataclasses.dataclass(frozen=True)
class MeshRule(Offer):
    """A function `(cfg) -> cfg` or `(cfg, accelerator) -> cfg` that adapts a config to an accelerator.

    Attributes:
        pattern: a glob of the accelerators that the rule applies to, such as `gpu-h100-*`.
        devices: the least and the largest number of devices that the rule applies to; None: no limit.
        recipe: a glob of the recipes that the rule applies to.
    """

    hook, kind = "axcore_mesh_rules", "mesh rule"
    pattern: str
    devices: tuple[int, int | None] = (1, None)
    recipe: str = "*"

    def why_not(self, accelerator: Accelerator, recipe: str) -> str:
        """Why the rule does not apply to a recipe on an accelerator; empty if it applies."""
        least, most = self.devices
        if not self.matches(accelerator):
            return f"it applies to {self.pattern}"
        if not least <= accelerator.count <= (most or accelerator.count):
            return f"it applies to {self.range}, not to {accelerator.count}"
        if not fnmatch.fnmatchcase(recipe, self.recipe):
            return f"it applies to the recipes {self.recipe}"
        return ""

    def matches(self, accelerator: Accelerator) -> bool:
        """Whether the pattern matches the name of the accelerator."""
        return fnmatch.fnmatchcase(accelerator.text, self.pattern)

    @property
    def range(self) -> str:
        """The number of devices in words; empty if there is no limit."""
        least, most = self.devices
        if most is None:
            return f"at least {least} devices" if least > 1 else ""
        return f"{least} to {most} devices"

    @property
    def strength(self) -> tuple[int, int, float]:
        """How specific the rule is, to compare with others: the literal characters of `recipe`, then those of
        `pattern`, then how few numbers of devices it applies to."""
        least, most = self.devices
        return _literals(self.recipe), _literals(self.pattern), least - (math.inf if most is None else most)


def _literals(pattern: str) -> int:
    return len(re.sub(r"\[!?\]?[^\]]*\]|[*?]", "", pattern))


class Recipe(Offer):
    """A function without required arguments that returns a trainer config."""

    hook, kind = "axcore_recipes", "recipe"


class Command(Offer):
    """A function `(arguments: list[str]) -> int` that runs a subcommand of `axcore` and returns its exit code."""

    hook, kind = "axcore_commands", "command"


class Check(Offer):
    """A function `() -> Iterable[str]` that returns what is wrong with the installation, for `axcore doctor`."""

    hook, kind = "axcore_checks", "check"


OFFERS: dict[str, type[Offer]] = {kind.hook: kind for kind in Offer.__subclasses__()}
"""The kind of offer that each hook returns, by the name of the hook."""
