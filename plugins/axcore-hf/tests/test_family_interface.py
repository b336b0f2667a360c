"""What a family from outside relies on: declarations of fields, shared helpers, and one owner of each `model_type`."""

import itertools
import pathlib
import re

import pytest

from axcore.config import AxcoreError, ConfigError
from axcore.nn import Attention, FeedForward, LayerNorm, TransformerLayer
from axcore_hf import families, owners
from axcore_hf.describing import described
from axcore_hf.families import by_type, family_of
from axcore_hf.families.rope import rope
from axcore_hf.families.shared import causal_lm, fixed, window
from axcore_hf.family import Family
from axcore_hf.fields import BOOKKEEPING, COMPUTED, Fields, NotNull, OrNull
from axcore_hf.plugin import axcore_commands

from .parity.seeded import changed
from .parity.test_changes import BASES, read

LLAMA = BASES["llama"]


def readme_family():
    """The family of the README's example."""
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "FAMILY" in block)
    found = {}
    exec(code, found)
    return found["FAMILY"]


def test_case_the_example_family_of_the_readme_refuses_what_it_does_not_compute():
    family, raw = readme_family(), LLAMA | {"model_type": "mymodel"}
    assert family.read_config(Fields(raw)) == by_type("llama").read_config(Fields(LLAMA))
    changes = ({"sliding_window": 7}, {"sliding_window": None}, {"use_qk_norm": False}, {"logit_scale": 0})
    for change in changes:
        with pytest.raises(ConfigError, match=f"not supported for model_type 'mymodel': {next(iter(change))}="):
            family.read_config(Fields(raw | change))
    applied = family.read_config(Fields(raw | {"partial_rotary_factor": 0.5}))
    assert applied.decoder.layers.attention.position.rotary_dim == 2


@pytest.mark.parametrize("base", BASES)
def test_case_every_declared_field_is_read_and_no_other(base):
    family = by_type(BASES[base]["model_type"])
    fields = Fields(BASES[base], defaults=family.defaults, no_effect=family.no_effect, aliases=family.aliases)
    family.model(fields)
    ignored = {*family.no_effect, *BOOKKEEPING, *COMPUTED}
    for_any_family = {"partial_rotary_factor", "quantization_config"} - family.defaults.keys()
    assert fields._read - ignored - for_any_family == family.defaults.keys()
    assert family.defaults.keys().isdisjoint(ignored)


YARN = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 16}
LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LINEAR = {"rope_type": "linear", "factor": 3.0}
CONTEXTS = (
    {},
    {"rope_parameters": []},
    {"rope_parameters": [YARN]},
    {"rope_parameters": [YARN], "head_dim": [4]},
    {"rope_parameters": [{"full_attention": LLAMA3}]},
    {"rope_parameters": [], "layer_types": []},
    {"no_rope_layers": [], "layer_types": []},
    {"use_sliding_window": [True], "max_window_layers": [1], "layer_types": [], "sliding_window": [5]},
    {"use_sliding_window": [True], "sliding_window": [5]},
)
"""Changes that give every field something to act on."""
OTHERS = {
    "head_dim": 6,
    "num_key_value_heads": 1,
    "rope_parameters": LINEAR,
    "rope_scaling": LINEAR,
    "layer_types": ["full_attention"],
    "mlp_only_layers": [0, 1],
    "original_max_position_embeddings": 7,
    "n_inner": 12,
    "no_rope_layers": [0, 1, 0],
    "final_logit_softcapping": 2.0,
    "sliding_window": 5,
    "qk_head_dim": 3,
    "use_bidirectional_attention": True,
    "rope_theta": 100.0,
    "clip_qkv": 0.5,
    "num_ln_in_parallel_attn": 2,
}
"""Values of fields that are null or absent."""


def has_effect(base, context, name, default):
    """Whether another value of the field changes the model or is refused."""
    try:
        model = read(base, context)[1]
    except ConfigError:
        return False
    current = changed(BASES[base], context).get(name, default)
    if current is None or isinstance(current, list | dict):
        others = [OTHERS[name]]
    elif isinstance(current, bool):
        others = [not current]
    elif isinstance(current, str):
        others = ["relu"]
    else:
        others = [2 * current, current + 1, current / 2 if isinstance(current, float) else max(current // 2, 1)]
    for other in others:
        try:
            if read(base, {**context, name: [other]})[1] != model:
                return True
        except ConfigError:
            return True
    return False


@pytest.mark.parametrize("kind", sorted({fields["model_type"] for fields in BASES.values()}))
def test_case_every_declared_field_changes_the_model_or_is_refused(kind):
    family = by_type(kind)
    of_family = [base for base, fields in BASES.items() if fields["model_type"] == kind]
    contexts = [each for each in CONTEXTS if each.keys() <= family.defaults.keys()]
    for name, default in family.defaults.items():
        plain = default.default if isinstance(default, OrNull | NotNull) else default
        places = itertools.product(of_family, contexts)
        assert any(has_effect(base, context, name, plain) for base, context in places), f"{name} is read and ignored"


def test_case_an_absent_field_a_null_and_a_second_name():
    fields = Fields(
        {"sliding_window": None, "num_hidden_layers": None, "num_experts": 4},
        defaults={"sliding_window": OrNull(4096), "num_hidden_layers": 32, "head_dim": 128},
        aliases={"num_experts": "num_local_experts"},
    )
    assert fields("sliding_window") is None and fields("head_dim") == 128 and fields("num_local_experts") == 4
    assert fields.optional("rope_scaling") is None
    with pytest.raises(ConfigError, match="num_hidden_layers=None must be a positive whole number"):
        fields("num_hidden_layers")
    with pytest.raises(ConfigError, match="no field 'hidden_size', and its family declares no default"):
        fields("hidden_size")
    with pytest.raises(ConfigError, match="num_local_experts=2 and num_experts=4 are names of the same field"):
        Fields({"num_local_experts": 2, "num_experts": 4}, aliases={"num_experts": "num_local_experts"})


@pytest.mark.parametrize("field", ["add_cross_attention", "is_encoder_decoder"])
def test_case_what_no_family_computes_is_refused(field):
    with pytest.raises(ConfigError, match=rf"{field}=True is not supported for model_type 'llama'\. Known: False\."):
        by_type("llama").read_config(Fields(LLAMA | {field: True}))


def test_case_a_misspelled_field_is_refused_with_the_right_name():
    expected = r"hiden_act='silu'\. Did you mean 'hidden_act'\? .* Remove one only if transformers ignores it"
    with pytest.raises(ConfigError, match=expected):
        by_type("llama").read_config(Fields(LLAMA | {"hiden_act": "silu"}))
    with pytest.raises(ConfigError, match=r"attention_multiplier=0\.1\. Fields"):  # of Granite, not a misspelling
        by_type("llama").read_config(Fields(LLAMA | {"attention_multiplier": 0.1}))


def test_case_helpers_read_only_what_they_use():
    fields = Fields({"vocab_size": 8, "hidden_size": 4, "tie_word_embeddings": True, "sliding_window": 0})
    layer = TransformerLayer.Config(attention=Attention.Config(num_heads=1), ffn=FeedForward.Config(hidden_dim=4))
    assert causal_lm(fields, [layer], norm=LayerNorm.Config()).norm == LayerNorm.Config()
    assert fields("sliding_window") == 0
    with pytest.raises(ConfigError, match="size must be at least 1"):
        window(0)
    assert rope(Fields({"rope_theta": 100.0, "head_dim": 8}), partial_rotary_factor=0.5).rotary_dim == 4


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"model_type": "dbrx", "logit_scale": 0.06}, "the family llama does not have: logit_scale=0.06. Its"),
        (
            {"model_type": "persimmon", "partial_rotary_factor": 0.5},
            "the family llama ignores: partial_rotary_factor=0.5. Its",
        ),
        ({"model_type": "helium"}, "vipllava. Its layers may also differ in ways that config.json does not describe"),
    ],
)
def test_case_the_refusal_of_an_unknown_family_says_what_differs(raw, message):
    with pytest.raises(ConfigError, match=f"model_type='{raw['model_type']}' is not supported.*{message}"):
        family_of(Fields(LLAMA | raw))


@pytest.fixture
def distributions(tmp_path, monkeypatch):
    """`distributions(name, **types)` installs a distribution with the Llama family for each `model_type`."""
    monkeypatch.syspath_prepend(tmp_path)

    def install(name, **types):
        info = tmp_path / f"{name}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        points = [f"{kind} = {target}\n" for kind, target in types.items()]
        (info / "entry_points.txt").write_text(f"[{owners.GROUP}]\n{''.join(points)}")

    yield install
    monkeypatch.undo()
    families._owners.cache_clear()


def test_case_two_owners_of_a_model_type_disable_only_this_type(distributions):
    """Also installed while the process runs: `family_of` looks again for an unknown type."""
    with pytest.raises(ConfigError, match="model_type='mymodel' is not supported"):
        family_of(Fields(LLAMA | {"model_type": "mymodel"}))
    one = "axcore_hf.families.llama:FAMILIES"
    distributions("mine", qwen2=one, mymodel=one)
    distributions("yours", mymodel=one)
    mine, qwen = (
        f"model_type {kind!r} has a family in {one} and in {other}"
        for kind, one, other in (("mymodel", "mine", "yours"), ("qwen2", "axcore-hf", "mine"))
    )
    with pytest.raises(AxcoreError, match=mine):
        family_of(Fields(LLAMA | {"model_type": "mymodel"}))
    with pytest.raises(AxcoreError, match=qwen):
        read("qwen2")
    assert read("llama")[1] and [offer.name for offer in axcore_commands()] == ["convert", "export"]
    assert [problem.partition(" (entry points")[0] for problem in families.problems()] == [mine, qwen]


def test_case_an_unknown_type_is_named_although_llama_has_two_owners(distributions):
    distributions("mine", llama="axcore_hf.families.llama:FAMILIES")
    families._owners.cache_clear()
    with pytest.raises(ConfigError, match=r"model_type='dbrx' is not supported.*does not have: logit_scale=0.06"):
        family_of(Fields(LLAMA | {"model_type": "dbrx", "logit_scale": 0.06}))


def fails(fields):
    raise KeyError("width")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda fields: None, r"the function `model` of the family Mine returned NoneType, not a CausalLM\.Config"),
        (fails, rf"the function `model` of the family Mine failed at {re.escape(__file__)}:\d+: KeyError: 'width'"),
    ],
)
def test_case_a_family_whose_function_fails_is_named(model, message):
    with pytest.raises(AxcoreError, match=message):
        Family("Mine", ("mine",), model, fixed(())).read_config(Fields({}))


def test_case_rules_that_are_not_a_function_are_refused():
    with pytest.raises(ConfigError, match=r"Family 'Mine': rules must be a function, such as fixed\(RULES\), not a"):
        Family("Mine", ("mine",), fails, ())


def test_case_a_broken_family_does_not_prevent_exports(distributions):
    """A run's config.json is found among the other families. If there is none, the message names the broken family."""
    model = read("gpt2")[1]
    distributions("mine", broken="absent_module:FAMILY")
    families._owners.cache_clear()
    assert described(model)["model_type"] == "gpt2"
    with pytest.raises(AxcoreError, match=r"Not compared with broken: .* cannot be loaded: ModuleNotFoundError: No"):
        described(model.set(softcap=5.0))
