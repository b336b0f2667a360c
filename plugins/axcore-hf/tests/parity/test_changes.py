"""Changes of one field of a config.json, against recorded values of `transformers` (see record_changes.py).

A changed config is either refused, or describes the model that `transformers` builds.
"""

import contextlib
import functools
import json
import pathlib
from types import MappingProxyType

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.module import abstract
from axcore.nn import by_layer, layers_of
from axcore.train.checkpoint.model_folder import flat, like
from axcore_hf import importing
from axcore_hf.families import MULTIMODAL, by_type, family_of, language_part
from axcore_hf.families.shared import window
from axcore_hf.family import matches
from axcore_hf.fields import Fields, OrNull

from .seeded import IDS, LARGEST, changed, digest, projections, weights

FILES = sorted((pathlib.Path(__file__).parent / "recorded").glob("*/changes.json"))
RECORDED = {file.parent.name: json.loads(file.read_text()) for file in FILES}
BASES = {base: recorded["base"] for base, recorded in RECORDED.items()}
OF_KIND = {recorded["base"]["model_type"]: recorded for recorded in RECORDED.values()}
TIED = {outer: (base, tied) for base, recorded in RECORDED.items() for outer, tied in recorded["tied"].items()}
CASES: dict[str, list[tuple[str, list]]] = {}
for base, recorded in RECORDED.items():
    for case, change in recorded["cases"].items():
        CASES.setdefault(case, []).append((base, *change))
UNCHANGED = CASES["no change"]
RANDOM = [(base, *change) for base, recorded in RECORDED.items() for change in recorded["random"]]
TOLERANCE = 1e-3


class Seeded:
    """A source with the tensors that a model's family expects."""

    where = "seeded"

    def __init__(self, shapes):
        self.shapes = shapes

    def read(self, name):
        return weights(name, self.shapes[name])


def read(base, change=MappingProxyType({})):
    """(family, model config) of a changed config."""
    fields = Fields(changed(BASES[base], change))
    family = family_of(fields)
    return family, family.read_config(fields)


@functools.cache
def computed(kind, model):
    """(digest of the tensors, projections of the logits)."""
    family = by_type(kind)
    fn, params, state = abstract(model)
    params_of, state_of = flat(params), flat(state)
    forms = {**state_of, **params_of}
    places = by_layer(model, forms)
    shapes = {name: tuple(forms[path].shape[len(index) :]) for name, (path, index) in places.items()}
    chosen = [next(each for each in some if each.rule.can_write) for some in matches(family, model, shapes)]
    source = Seeded({name: tuple(shape) for match in chosen for name, shape in match.expected().items()})
    assert sum(np.prod(shape) for shape in source.shapes.values()) < 2 * LARGEST
    arrays = {path: jnp.zeros(form.shape, form.dtype) for path, form in state_of.items()}
    arrays |= importing.load(family, model, source, model, params_of, state_of)
    params, state = like(params, arrays), like(state, arrays)
    with jax.disable_jit():  # the operations are compiled once for all models
        logits = fn(params, state, jnp.asarray(IDS, jnp.int32))[0][0]
    return digest(source.shapes), projections(logits)


def check(base, change, expected):
    """Returns whether axcore refuses the change. Fails if it computes something else."""
    try:
        family, model = read(base, change)
        tensors, logits = computed(family.model_types[0], model)
    except AxcoreError:
        return True
    if expected is None:  # transformers refuses it, for example a null of a field that has no effect
        assert model == read(base)[1], f"{base}, {change}: transformers raises an error"
        return False
    assert tensors == expected[0], f"{base}, {change}: other tensors"
    np.testing.assert_allclose(logits, expected[1], rtol=0, atol=TOLERANCE, err_msg=f"{base}, {change}")
    return False


def test_case_what_transformers_writes_is_accepted():
    for base in BASES:
        read(base)


@pytest.mark.parametrize("kind", OF_KIND)
def test_case_defaults_of_absent_fields_are_those_of_transformers(kind):
    family, recorded = by_type(kind), OF_KIND[kind]["defaults"]
    for name, default in family.defaults.items():
        if name in recorded:
            plain = default.default if isinstance(default, OrNull) else default
            assert plain == recorded[name][0], name
            assert not isinstance(default, OrNull) or len(recorded[name]) == 2, f"{name} must not be null"
    if kind != "gpt2":
        theta = OF_KIND[kind]["theta"]
        own = family.defaults.get("rotary_emb_base", family.defaults["rope_theta"])
        found = own, family.defaults.get("rope_local_base_freq")
        assert found == ((theta["global"], theta["local"]) if isinstance(theta, dict) else (theta, None))


@pytest.mark.parametrize("base", BASES)
def test_case_a_null_head_dim_is_refused_unless_the_config_class_replaces_it(base):
    """With other classes, `transformers` computes with the null and raises an error."""
    change = {"head_dim": [None]}
    is_default = OF_KIND[BASES[base]["model_type"]]["defaults"].get("head_dim") == [None]
    if is_default or any(each == change and result for each, result in RECORDED[base]["published"]):
        read(base, change)
        return
    with pytest.raises(ConfigError, match="head_dim"):
        read(base, change)


def test_case_mistral_without_a_window_has_that_of_transformers():
    place, *_ = layers_of(read("mistral", {"sliding_window": []})[1].decoder)
    assert place.config.attention.mask == window(4096)


@pytest.mark.parametrize("outer", MULTIMODAL)
def test_case_tie_word_embeddings_of_a_multimodal_folder(outer):
    base, combinations = TIED[outer]
    for around, within, tied in combinations:
        nested = changed(BASES[base], {"tie_word_embeddings": within})
        raw = changed({"model_type": outer, "text_config": nested}, {"tie_word_embeddings": around})
        part = language_part(Fields(raw))
        assert (family_of(part).read_config(part).head is None) == tied, (around, within)


@pytest.mark.parametrize("base", BASES)
def test_case_bidirectional_models_are_refused(base):
    with pytest.raises(ConfigError, match=r"is_causal=False is not supported for model_type '\w+'\. Known: True\."):
        read(base, {"is_causal": [False]})


def test_case_fields_that_axcore_ignores_have_no_effect_in_transformers():
    """A random change that axcore reads as no change does not change the recorded logits."""
    models = {base: read(base)[1] for base in BASES}
    recorded = {base: result for base, _, result in UNCHANGED}
    compared = 0
    for base, change, result in RANDOM:
        with contextlib.suppress(ConfigError):
            if read(base, change)[1] == models[base] and result is not None:
                assert result[0] == recorded[base][0], f"{base}, {change}: other tensors"
                np.testing.assert_allclose(result[1], recorded[base][1], rtol=0, atol=1e-5, err_msg=f"{base}, {change}")
                compared += 1
    assert compared > 50


def rope_of(base, **fields):
    return {"rope_parameters": [BASES[base]["rope_parameters"] | fields]}


LENGTH = "original_max_position_embeddings"
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, LENGTH: 1000}
GPT_OSS = {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False, LENGTH: 4096}
EXPLICIT = {
    "original length beside yarn": {"rope_parameters": [YARN]},
    "original length beside llama3": rope_of("llama3", **{LENGTH: 8}),
    "original length beside longrope": {**rope_of("phi3", **{LENGTH: 64}), LENGTH: [64]},
    "original length only inside longrope": {**rope_of("phi3", **{LENGTH: 4096}), LENGTH: [4096]},
    "gemma3 without a local base": rope_of("gemma3", full_attention={"rope_type": "default", "rope_theta": 1e6}),
    "gemma3 with flat parameters": rope_of("gemma3", full_attention={"rope_type": "default", "rope_theta": 1e6}),
    "gemma3 with attn_logit_softcapping": {},
    "gemma3 with partial_rotary_factor": rope_of(
        "gemma3", full_attention={"rope_type": "default", "rope_theta": 100.0}
    ),
    "gpt-oss without scaling": {"rope_parameters": [GPT_OSS | {"rope_theta": 150_000.0}]},
    "gemma2 without attn_logit_softcapping": {"attn_logit_softcapping": [50.0]},
    "gemma2 without final_logit_softcapping": {"final_logit_softcapping": [30.0]},
    "llama with partial_rotary_factor": {},
}
"""Other spellings of changes, which leave nothing to defaults."""


@pytest.mark.parametrize("name", EXPLICIT)
def test_case_changes_are_read_as_their_explicit_spelling(name):
    ((base, change, _),) = CASES[name]
    assert read(base, change)[1] == read(base, EXPLICIT[name])[1]


REFUSED = (
    "bidirectional",
    "gpt-neox with only the usual theta",
    "olmoe with clip_qkv",
    "olmoe with other heads",
    "phi with a tied head",
    "phi with other heads",
    "qwen2-moe with windows that are not used",
    "qwen2-moe without a window",
)
"""Changes that axcore refuses."""


@pytest.mark.long
@pytest.mark.parametrize("name", sorted(CASES.keys() - {"no change"}))
def test_case_changes(name):
    refused = [check(*change) for change in CASES[name]]
    assert all(refused) if name in REFUSED else not any(refused)


@pytest.mark.slow
@pytest.mark.parametrize("base", [base for base, recorded in RECORDED.items() if recorded["published"]])
def test_case_changes_of_published_configs(base):
    assert not any(check(base, *change) for change in RECORDED[base]["published"])


@pytest.mark.slow
def test_case_random_changes_of_one_field_match_or_are_refused():
    assert not any(check(*change) for change in UNCHANGED)
    refused = [check(*change) for change in RANDOM]
    print(f"{len(refused)} changes, of which {sum(refused)} are refused")
    assert len(refused) >= 500
