"""Multi-token prediction against NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import axcore as ax
from axcore.module import abstract
from axcore.nn import Attention, CausalLM, FeedForward, MultiTokenPrediction, Repeat, TransformerLayer
from axcore.parallel import Remat
from axcore.train import CrossEntropy

from . import reference
from .support import call, layer_of, parameters, score, shapes, wide

pytestmark = pytest.mark.long

VOCAB, DIM, HEADS, ROWS, SEQ = 7, 4, 2, 2, 6
LAYER = TransformerLayer.Config(attention=Attention.Config(num_heads=HEADS), ffn=FeedForward.Config(hidden_dim=6))
SEGMENTS = np.array([[0, 0, 0, 0, 1, 1], [3, 3, 4, 4, 4, 4]], np.int32)
RANDOM = np.random.default_rng(1)
IDS = RANDOM.integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
BATCH = {
    "inputs": IDS[:, :-1],
    "targets": IDS[:, 1:],
    "weights": np.array([[1, 0.5, 1, 1, 2, 1], [1, 1, 0, 1, 1, 1]], np.float32),
}
OBJECTIVE = CrossEntropy.Config().build()
PACKED = BATCH | {"segment_ids": SEGMENTS}


def model(ahead=2, **options):
    decoder = Repeat.Config(num_layers=2, layers=LAYER)
    future = (MultiTokenPrediction.Config(layer=LAYER),) * ahead
    return CausalLM.Config(**{"vocab_size": VOCAB, "dim": DIM, "decoder": decoder, "future": future} | options)


def losses(params, batch=BATCH, ahead=2, embed=lambda x: x, last=lambda x: x):
    """[(weighted sum, weight) of the model and of each module], computed token by token."""
    p, ids, segments = wide(params), batch["inputs"], batch.get("segment_ids")
    head = p["head"]["weight"] if "head" in p else p["embedding"]["weight"].T
    allowed = reference.causal(*ids.shape, segments)
    hidden = embed(p["embedding"]["weight"][ids])
    for index in range(2):
        hidden = reference.transformer_layer(hidden, layer_of(p["decoder"]["layers"], index), HEADS, HEADS, allowed)
    found = [reference.objective(last(reference.rms_norm(hidden, p["norm"]["scale"]) @ head), batch["targets"],
                                 batch["weights"])[0]]  # fmt: skip
    for step in range(1, ahead + 1):
        m = p["future"][step - 1]
        both = np.zeros((ROWS, SEQ, 2 * DIM))
        targets, weights = np.zeros((ROWS, SEQ), np.int32), np.zeros((ROWS, SEQ))
        for row in range(ROWS):
            for i in range(SEQ):
                there = i + step < SEQ
                token = ids[row, i + step] if there else 0  # no token with a weight sees it
                later = embed(p["embedding"]["weight"][token])
                both[row, i, :DIM] = reference.rms_norm(hidden[row, i], m["hidden_norm"]["scale"])
                both[row, i, DIM:] = reference.rms_norm(later, m["embedding_norm"]["scale"])
                if there and (segments is None or segments[row, i] == segments[row, i + step]):
                    targets[row, i] = batch["targets"][row, i + step]
                    weights[row, i] = batch["weights"][row, i + step]
        hidden = reference.transformer_layer(both @ m["projection"]["weight"], m["layer"], HEADS, HEADS, allowed)
        logits = last(reference.rms_norm(hidden, m["norm"]["scale"]) @ head)
        found.append(reference.objective(logits, targets, weights)[0])
    return found


@pytest.mark.parametrize("batch", [BATCH, PACKED], ids=["one document in each row", "packed"])
@pytest.mark.parametrize("ahead", [1, 2])
def test_each_module_predicts_one_token_further_ahead(ahead, batch):
    cfg = model(ahead)
    params = parameters(cfg)
    loss, added = score(cfg, params, batch)
    own, *further = losses(params, batch, ahead)
    np.testing.assert_allclose(loss, own, rtol=1e-5)
    for index, value in enumerate(further):
        np.testing.assert_allclose(added.pop(f"future.{index}"), 0.3 * value / ahead, rtol=1e-5)
    assert not added


@pytest.mark.parametrize("weight", [0.0, 0.1, 2.0])
def test_future_weight_multiplies_the_mean_of_the_losses(weight):
    cfg = model(future_weight=weight)
    params = parameters(cfg)
    _, added = score(cfg, params, BATCH)
    np.testing.assert_allclose(sum(added.values()), weight * np.mean(losses(params)[1:]), rtol=1e-5)


def test_modules_share_embedding_scale_logit_scale_softcap_and_chunks_with_the_model():
    cfg = ax.select(model(head=None, logit_scale=0.5, softcap=1.5), "embedding").set(scale=2.0)
    params = parameters(cfg)
    loss, added = score(cfg, params, PACKED, chunk=4)
    own, *further = losses(params, PACKED, embed=lambda x: 2.0 * x, last=lambda x: 1.5 * np.tanh(0.5 * x / 1.5))
    np.testing.assert_allclose(loss, own, rtol=1e-5)
    np.testing.assert_allclose(sum(added.values()), 0.3 * np.mean(further), rtol=1e-5)


@pytest.mark.slow
def test_loss_and_gradient_are_zero_if_all_weights_are_zero():
    cfg = model()
    params, fn = parameters(cfg), shapes(cfg)[0]
    weights = np.zeros((ROWS, SEQ), np.float32)
    weights[:, 0] = 1  # the modules have no target: the first module starts at the second token

    def objective(params):
        (_, collections), _ = fn(params, {}, BATCH | {"weights": weights}, method=OBJECTIVE)
        return collections.total_loss()

    value, slopes = jax.jit(jax.value_and_grad(objective))(params)
    assert value == 0
    assert not any(np.any(slope) for slope in jax.tree.leaves(slopes))


@pytest.mark.parametrize("seq", [1, 2])
def test_rows_may_be_shorter_than_the_prediction_distance(seq):
    cfg = model()
    params = parameters(cfg)
    short = {name: value[:, :seq] for name, value in BATCH.items()}
    loss, added = score(cfg, params, short)
    assert np.isfinite([loss, *added.values()]).all()
    assert (sum(added.values()) == 0) == (seq == 1)


def test_logits_and_the_next_token_loss_do_not_depend_on_the_modules():
    cfg, plain = model(), model(0)
    params = parameters(cfg)
    own = {name: value for name, value in params.items() if name != "future"}
    np.testing.assert_array_equal(call(cfg, params, BATCH["inputs"])[0], call(plain, own, BATCH["inputs"])[0])
    assert score(cfg, params, BATCH)[0] == score(plain, own, BATCH)[0]


@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_every_parameter_has_a_gradient_from_later_tokens(compute):
    cfg = ax.select(model(), "decoder").set(remat=Remat()).set(dtypes=ax.DTypes(compute=compute))
    params, fn = parameters(cfg), shapes(cfg)[0]

    def objective(params):
        (_, collections), _ = fn(params, {}, PACKED, key=jax.random.key(0), training=True, method=OBJECTIVE)
        return collections.total_loss()

    for path, slope in jax.tree.leaves_with_path(jax.jit(jax.grad(objective))(params)):
        at = jax.tree_util.keystr(path, simple=True, separator=".")
        assert jnp.isfinite(slope).all(), at
        assert (np.abs(slope).max() > 1e-6) == (at != "norm.scale"), (
            at
        )  # the modules do not use the last norm of the model


def test_parameters_of_a_module_have_the_axes_of_the_model():
    axes = abstract(model())[0].axes["future"][0]
    assert axes["projection"]["weight"] == ("embed", None)
    assert axes["layer"]["ffn"]["up"]["weight"] == ("embed", "mlp")


def test_an_invalid_module_raises_with_its_path():
    cfg = model().set(future=(MultiTokenPrediction.Config(), MultiTokenPrediction.Config(layer=LAYER)))
    with pytest.raises(ax.ConfigError, match=r"future\.0\.layer\..*REQUIRED"):
        abstract(cfg)
