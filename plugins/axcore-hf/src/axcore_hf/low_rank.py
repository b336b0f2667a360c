"""Low-rank changes of linear layers, between the names and forms of `transformers` and those of axcore.

A change of a weight is a product of two factors, for any weight [in, out]: `a`, [in, rank], times `b`, [rank, out]. In
PEFT, a linear module has A, [rank, in], and B, [out, rank]. The transforms of a family only move and divide output
features, so they convert B as they convert a weight with `rank` inputs. Weights that come from one module share its A.
"""

from __future__ import annotations

import pathlib
import shutil
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import safetensors.numpy

from axcore.config import AxcoreError, did_you_mean
from axcore.module import abstract
from axcore.nn import by_layer, without_numerics
from axcore.train.checkpoint.model_folder import flat
from axcore.train.checkpoint.state_layout import listed
from axcore_hf.describing import described
from axcore_hf.families import family_of
from axcore_hf.family import Family, Match, matches
from axcore_hf.fields import Fields
from axcore_hf.sources import Safetensors, language_name
from axcore_hf.transforms import Array, Shapes, Stacked
from axcore_hf.vocabulary import padded, unpadded_shapes

WEIGHT, HEAD = ".weight", "lm_head"


class Factors(NamedTuple):
    """Two factors of a change, as in PEFT: A [rank, in] and B [out, rank]; or, in axcore, a [in, rank] and b [rank,
    out], with a leading dimension for experts."""

    a: Array
    b: Array


class OfModules(NamedTuple):
    """The factors of a linear layer, and the modules that they come from: one, or one for each expert."""

    factors: Factors
    modules: tuple[str, ...]


class LinearNames:
    """The linear layers of a model, by the names that `transformers` and axcore have for them.

    Args:
        model: config of a model without adapters.
        linears: names of its linear layers as in `axcore.nn.by_layer`, such as `decoder.0.attention.query`.

    Raises:
        AxcoreError: the model does not compute what a published family does.
    """

    def __init__(self, model: Any, linears: Collection[str]):
        model = without_numerics(model).set(future=())  # what only training has
        self._model, self._linears = model, frozenset(linears)
        self._family = family_of(Fields(described(model), "the config of the model"))
        forms = {path: form for tree in abstract(model)[1:] for path, form in flat(tree).items()}
        self._places = by_layer(model, forms)
        self._forms: Mapping[str, jax.ShapeDtypeStruct] = forms
        self._unpadded = unpadded_shapes(model, forms)

    def _shape(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
        path, index = self._places[name]
        return shapes[path][len(index) :]

    def _matches(self, family: Family) -> list[Match]:
        """The rules of weights, at each of their places. Where checkpoints have several names for a head, that of the
        module comes first."""
        shapes = {name: self._shape(name, self._unpadded) for name in self._places}
        return [
            match
            for candidates in matches(family, self._model, shapes)
            for match in sorted(candidates, key=lambda each: each.theirs != (f"{HEAD}{WEIGHT}",))
            if all(name.endswith(WEIGHT) for name in (*match.ours, *match.theirs))
        ]

    def read(self, given: Mapping[str, Factors], where: str) -> dict[str, OfModules]:
        """Converts the factors of modules to those of linear layers.

        Args:
            given: the factors by the name of the module, such as `model.layers.0.self_attn.q_proj`.
            where: their file, for messages.

        Raises:
            AxcoreError: a module is unknown or is not a linear layer, or a shape does not fit.
        """
        family, original = self._family, {language_name(name) or name: name for name in given}
        given = {name: given[whole] for name, whole in original.items()}  # also those of a multimodal model
        if not any(name.startswith(family.prefix) for name in given):
            family = family.without_prefix()
        known = self._matches(family)
        by_module = {_module(name): match for match in known for name in match.theirs}
        wrong = [
            f"{name} is not a module of {family.name}.{did_you_mean(name, by_module)}"
            for name in given.keys() - by_module
        ]
        found: dict[str, OfModules] = {}
        for match in {id(by_module[name]): by_module[name] for name in given if name in by_module}.values():
            modules = [_module(name) for name in match.theirs]
            if not self._linears.issuperset(map(_module, match.ours)) or (
                len(modules) > 1 and not isinstance(match.rule.transform, Stacked)
            ):
                wrong.append(f"{modules[0]} is not a linear layer of its own, so it cannot have an adapter")
            elif lacking := [name for name in modules if name not in given]:
                wrong.append(f"{lacking[0]} has no adapter, but other experts of its layer have one")
            elif misshapen := [text for name in match.theirs if (text := _misfit(match, name, given[_module(name)]))]:
                wrong += misshapen
            elif len(ranks := {given[name].a.shape[0] for name in modules}) > 1:
                wrong.append(f"the experts from {modules[0]} on have different ranks: {sorted(ranks)}")
            else:
                parts = self._split(match, [given[name] for name in modules])
                found |= {
                    name: OfModules(factors, tuple(original[each] for each in modules))
                    for name, factors in parts.items()
                }
        if wrong:
            raise AxcoreError(f"{where} does not fit the model:{listed(sorted(wrong))}")
        return found

    def _split(self, match: Match, given: list[Factors]) -> dict[str, Factors]:
        """The factors of the weights of one rule."""
        rank = given[0].a.shape[0]
        is_transposed = _out_comes_first(match)
        b_of = {name: each.b if is_transposed else each.b.T for name, each in zip(match.theirs, given, strict=True)}
        shapes = [(*shape[:-2], rank, shape[-1]) for shape in match.shapes]
        made: dict[str, list[tuple[Array, Array]]] = {}
        for number, index, b in match.rule.transform.pieces(b_of.__getitem__, match.theirs, shapes):
            a = given[index[0] if index else 0].a.T
            made.setdefault(match.ours[number], []).append((a, b))
        found = {}
        for name, parts in made.items():
            out = self._shape(name, {path: form.shape for path, form in self._forms.items()})[-1]
            pairs = [(a, padded(b, (rank, out))) for a, b in parts]
            a, b = (np.stack(each) if len(pairs) > 1 else each[0] for each in zip(*pairs, strict=True))
            if len(match.shapes[0]) == 3 and a.ndim == 2:  # one expert
                a, b = a[None], b[None]
            found[_module(name)] = Factors(a, b)
        return found

    def write(self, given: Mapping[str, Factors]) -> dict[str, Factors]:
        """Converts the factors of linear layers to those of modules. Weights of one module whose `a` differ get a rank
        of its own each, so the rank of the module is their sum.

        Args:
            given: the factors by the name of the linear layer.

        Raises:
            AxcoreError: `transformers` has no linear module for a layer, as for experts.
        """
        found: dict[str, Factors] = {}
        written: set[str] = set()
        for match in self._matches(self._family):
            ours = [_module(name) for name in match.ours]
            held = [name for name in ours if name in given]
            if not held or len(match.theirs) > 1 or any(len(s) != 2 for s in match.shapes):
                continue
            if written.issuperset(held):
                continue
            written.update(held)
            found[_module(match.theirs[0])] = self._joined(match, [given.get(name) for name in ours])
        if left := sorted(given.keys() - written):
            raise AxcoreError(
                f"transformers has no linear module for the adapters of:{listed(left)}\nMerge them (axcore merge), or "
                f"train without them (where=)"
            )
        return found

    def have_inputs_first(self, modules: Collection[str]) -> bool:
        """Whether the weight of one of these modules is [in, out], as in GPT-2."""
        known = {_module(name): match for match in self._matches(self._family) for name in match.theirs}
        return any(not _out_comes_first(known[module]) for module in modules)

    def _joined(self, match: Match, given: list[Factors | None]) -> Factors:
        held = [each for each in given if each is not None]
        shares_a = len(held) == len(given) and all(np.array_equal(each.a, held[0].a) for each in held)
        rank = held[0].a.shape[1] if shares_a else sum(each.a.shape[1] for each in held)
        bs, start = [], 0
        for shape, each in zip(match.shapes, given, strict=True):
            b = np.zeros((rank, shape[-1]), np.float32)
            if each is not None:
                first, start = (0, 0) if shares_a else (start, start + each.a.shape[1])
                b[first : first + each.b.shape[0]] = each.b[:, : shape[-1]]  # without the padding of the vocabulary
            bs.append(b)
        (whole,) = match.rule.transform.write(bs)
        a = held[0].a if shares_a else np.concatenate([each.a for each in held], axis=1)
        return Factors(a.T, whole if _out_comes_first(match) else whole.T)


def tensors(file: pathlib.Path) -> dict[str, Array]:
    """The tensors of a safetensors file, by name.

    Raises:
        AxcoreError: the file is truncated or not a safetensors file.
    """
    source = Safetensors(file.parent, file.name)
    return {name: source.read(name) for name in source.shapes}


def save(folder: pathlib.Path, texts: Mapping[str, str], name: str, arrays: Mapping[str, Array]) -> None:
    """Writes a folder with text files and a safetensors file, atomically.

    Args:
        folder: the folder, which does not exist.
        texts: the contents of the text files, by name.
        name: the name of the safetensors file.
        arrays: its tensors.

    Raises:
        AxcoreError: the folder cannot be written.
    """
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for file, text in texts.items():
            (partial / file).write_text(text, encoding="utf-8")
        held = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        safetensors.numpy.save_file(held, partial / name, metadata={"format": "pt"})
        (partial / name).chmod(0o666 & partial.stat().st_mode)  # safetensors creates files that only the owner can read
        partial.rename(folder)
    except OSError as error:
        raise AxcoreError(f"cannot write {folder}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _module(name: str) -> str:
    return name.removesuffix(WEIGHT)


def _out_comes_first(match: Match) -> bool:
    """Whether the weight of the module is [out, in], not [in, out] as in GPT-2."""
    width = 1 + sum(shape[-1] for shape in match.shapes)  # a number of inputs that is not the number of outputs
    probe: Shapes = [(*shape[:-2], width, shape[-1]) for shape in match.shapes]
    return match.rule.transform.expected(probe)[0][-1] == width


def _misfit(match: Match, name: str, factors: Factors) -> str:
    """What is wrong with the shapes of the factors of a module."""
    expected = match.expected()[name]
    out, into = expected if _out_comes_first(match) else expected[::-1]
    if factors.a.ndim != 2 or factors.b.ndim != 2:
        return f"{_module(name)} has A {list(factors.a.shape)} and B {list(factors.b.shape)}, which are not matrices"
    rank = factors.a.shape[0]
    if factors.a.shape == (rank, into) and factors.b.shape == (out, rank):
        return ""
    return (
        f"{_module(name)} has A {list(factors.a.shape)} and B {list(factors.b.shape)}, expected [rank, {into}] and "
        f"[{out}, rank]"
    )
