"""Shows that a config field has an effect: changes one field of a small config, and compares what is observed."""

import collections.abc
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping

import jax
import optax
from flax import nnx

import axcore as ax
from axcore.config import AxcoreError, Config, ConfigError, walk
from axcore.config.node import field_names, type_name
from axcore.config.tree import get, join, transform
from axcore.config.types import arms_of, conforms, hints
from axcore.infer import GrammarCompiler
from axcore.infer.speculation import MTP
from axcore.nn import Initializer, Normal, Ones
from axcore.parallel import Remat, SaveMatmuls
from axcore.train import FromRun, JsonlWriter
from axcore_gemv.matmul import Gemv
from axcore_guided.compiler import LLGuidance
from axcore_lora import LoRAAdapters

Field = tuple[type[Config], str]


@dataclasses.dataclass(frozen=True)
class Host:
    """A small config, whose nodes' fields are changed one at a time.

    Attributes:
        observe: what the config does, in a form that can be compared. It raises a ConfigError if it is refused.
        at: the path of the node whose fields, and those of the nodes below it, are changed.
        fields: if given, only these fields of that node are changed.
    """

    cfg: Config
    observe: Callable[[Config], object]
    at: str = ""
    fields: tuple[str, ...] = ()


def everything(path, axes):
    """Selects every parameter."""
    return True


def nothing(path, axes):
    """Selects no parameter."""
    return False


VALUES: dict[str, tuple[object, ...]] = {
    "axcore.infer.engine.engine.Engine.adapters": (LoRAAdapters.Config(where=("nowhere",)),),
    "axcore.infer.engine.engine.Engine.speculation": (MTP.Config(),),
    "axes": (("kv_seq",), ("kv_seq", None), ("kv_seq", None, None)),
    **{f"axcore.module.layer.DTypes.{name}": ("float16",) for name in ("param", "compute", "accumulate", "output")},
    "axcore.nn.causal_lm.CausalLM.pad_vocab_to": (5,),
    "axcore.nn.feed_forward.FeedForward.activation": (jax.nn.gelu,),
    "axcore.nn.linear.Linear.matmul": (Gemv(),),
    "axcore.nn.third_party.Call.function": (optax.scale_by_belief,),
    "axcore.nn.third_party.Stock.module": (nnx.RMSNorm,),
    "axcore.parallel.mesh.Mesh.dcn": ({"data": 3},),
    "axcore.parallel.mesh.Mesh.shape": ({}, {"data": -1}, {"data": 2, "fsdp": -1}),
    "axcore_paged_attention.kernel.PagedAttention.max_queries": (2,),
    "axcore.train.run.trainer.Trainer.callbacks": ({"metrics": JsonlWriter.Config()},),
    "axcore.train.run.trainer.Trainer.compiler_options": ({"xla_cpu_enable_fast_min_max": True},),
    "axcore.train.run.trainer.Trainer.initial": (FromRun.Config(folder="missing"),),
    "axcore.train.step.learner.AdamW.decays": (everything,),
    "axcore.train.step.learner.AdamW.moment_dtype": ("bfloat16",),
    "max_file_bytes": (200,),
    "pages": ((3, 2),),
    "patterns": (("[0-9].txt",),),
    "axcore.train.data.mixture.Mixture.weights": ({"a": 1.0, "b": 1.0},),
    "axcore_rope.scaling.LongRoPE.long": ((3.0,) * 8,),
    "axcore_rope.scaling.LongRoPE.short": ((3.0,) * 8,),
    **{
        f"block_{name}": (128, 256)
        for name in ("q", "kv", "kv_compute", "q_dkv", "kv_dkv", "kv_dkv_compute", "q_dq", "kv_dq")
    },
    "axcore_muon.optimizer.Muon.coefficients": ((3.0, -4.0, 2.0),),
    "axcore_muon.optimizer.Muon.dtype": ("float32",),
    "axcore_muon.optimizer.Muon.orthogonalizes": (nothing,),
}
"""CLASS.FIELD or FIELD -> values to try, where the annotation does not give any."""

KINDS: Mapping[object, tuple[object, ...]] = {
    bool: (True, False),
    str: ("other",),
    ax.DTypes: (
        ax.DTypes(compute="float16", output="float16"),
        ax.DTypes(param="float16"),
        ax.DTypes(accumulate="bfloat16"),
    ),
    GrammarCompiler.Config: (LLGuidance.Config(),),
    Initializer: (Normal(stddev=0.5), Ones()),
    Remat: (SaveMatmuls(), Remat()),
}
"""A member of an annotation -> values to try."""


def values(cls: type[Config], name: str, held: object) -> list[object]:
    """Values of a field other than the one that it holds."""
    hint = hints(cls)[name]
    tried = list(VALUES.get(f"{type_name(cls)}.{name}", VALUES.get(name, ())))
    if not tried:
        for arm in arms_of(hint):
            origin, arguments = typing.get_origin(arm), typing.get_args(arm)
            if arm is type(None):
                tried.append(None)
            elif origin is typing.Literal:
                tried += arguments
            elif arm is int:
                number = held if type(held) is int else 3
                tried += [2 * number, number + 1, 1, 2]
            elif arm is float:
                number = held if isinstance(held, int | float) else 0.25
                tried += [number / 2, 2 * number, 0.5]
            elif origin is tuple and arguments[-1] is Ellipsis:
                tried.append(())
            elif origin is not None and isinstance(origin, type) and issubclass(origin, collections.abc.Mapping):
                tried.append({})
            else:
                tried += next((each for kind, each in KINDS.items() if kind is arm or kind == arm), ())
    return [value for value in tried if conforms(value, hint) and not (type(value) is type(held) and value == held)]


def changes(cfg: Config, path: str, node: Config, name: str) -> Iterator[tuple[Callable[[], Config], bool]]:
    """(function that returns the changed config, whether the value is the field's own) for each change of a field. In a
    slot, the fields of the child change, too."""
    held, prefix = getattr(node, name), join(path, name)

    def changed(value: object) -> Config:
        return transform(cfg, lambda at, each: each.set(**{name: value}) if at == path else each)

    for value in values(type(node), name, held):
        yield functools.partial(changed, value), True
    for below, child in walk(cfg):
        if below == prefix or below.startswith(f"{prefix}."):
            for inner in field_names(type(child)):
                if inner != "tags" and not _holds_nodes(getattr(child, inner)):
                    for change, _ in changes(cfg, below, child, inner):
                        yield change, False


def _holds_nodes(value: object) -> bool:
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else (value,)
    return any(isinstance(each, Config) for each in items)


def observed(host: Host, change: Callable[[], Config]) -> tuple[str, object]:
    """("done", observation), ("refused", message), ("raised", message) for an error that is not about configs, or
    ("invalid", message) if there is no such config."""
    try:
        cfg = change()
    except ConfigError as error:
        return "invalid", str(error)
    try:
        return "done", host.observe(cfg)
    except AxcoreError as error:
        return "refused", str(error)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"


def show(host: Host, proved: dict[Field, str]) -> Iterator[str]:
    """Adds the fields of the nodes of a host whose change has an effect or is refused. Yields errors that are not about
    configs.

    If the field of a child is refused when the whole is built, its slot is read. If it is refused when it is set, this
    says nothing about the slot.
    """
    usual = observed(host, lambda: host.cfg)
    assert usual[0] == "done", usual
    assert observed(host, lambda: transform(host.cfg, lambda _, each: each.set())) == usual, "not deterministic"
    refused: set[Field] = set()
    for path, node in walk(get(host.cfg, host.at), host.at):
        if host.fields and path != host.at:
            break
        for name in host.fields or field_names(type(node)):
            field = type(node), name
            if name == "tags":
                _check_tags(host.cfg, path)
                proved[field] = "done"
            elif field not in proved:
                for change, own in changes(host.cfg, path, node, name):
                    found = observed(host, change)
                    if found[0] == "raised":
                        yield f"{type_name(type(node))}.{name}: {found[1]}"
                    elif found[0] == "done" and found != usual:
                        proved[field] = "done"
                        break
                    elif found[0] == "refused" or (found[0] == "invalid" and own):
                        refused.add(field)
    for field in refused:
        proved.setdefault(field, "refused")


def _check_tags(cfg: Config, path: str) -> None:
    tagged = transform(cfg, lambda at, each: each.set(tags=("here",)) if at == path else each)
    assert [at for at, _ in ax.select(tagged, ax.tagged("here"))] == [path]
