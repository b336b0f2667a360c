"""TransformerLayer, Repeat and CausalLM against the formulas in float64."""

import jax
import numpy as np
import pytest

import axcore as ax
from axcore.nn import Attention, CausalLM, FeedForward, Linear, PerToken, Repeat, TokenInfo, TransformerLayer
from axcore.parallel import Remat, SaveMatmuls

from . import reference
from .support import call, layer_of, minimized, parameters, score, shapes, wide

pytestmark = pytest.mark.long

VOCAB, DIM, HEADS, KV_HEADS = 7, 4, 2, 1
LAYER = TransformerLayer.Config(
    attention=Attention.Config(num_heads=HEADS, num_kv_heads=KV_HEADS), ffn=FeedForward.Config(hidden_dim=6)
)
IDS = np.array([[1, 5, 0, 6, 2], [3, 3, 4, 1, 0]], np.int32)
SEGMENTS = np.array([[0, 0, 1, 1, 1], [0, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 0, 1, 2], [0, 0, 1, 2, 3]], np.int32)
X = np.random.default_rng(5).normal(size=(2, 5, DIM)).astype(np.float32)
WEIGHTS = np.array([[1, 0, 1, 2, 0.5], [0, 0, 1, 1, 1]], np.float32)
TOKENS = TokenInfo(np.arange(5, dtype=np.int32)[None], np.arange(5, dtype=np.int32)[None])
BATCH = {"inputs": IDS, "targets": np.roll(IDS, 1, axis=1), "weights": WEIGHTS}


def model(layers=2, **options):
    return CausalLM.Config(vocab_size=VOCAB, dim=DIM, decoder=Repeat.Config(num_layers=layers, layers=LAYER), **options)


def reference_logits(params, layers=2, segments=None):
    p = wide(params)
    stack = [layer_of(p["decoder"]["layers"], index) for index in range(layers)]
    return reference.logits(IDS, p, stack, HEADS, KV_HEADS, segments)


def reference_objective(params, batch=BATCH, z_loss=0.0, layers=2):
    segments = batch.get("segment_ids")
    return reference.objective(reference_logits(params, layers, segments), batch["targets"], batch["weights"], z_loss)


class Marked(Linear):
    """The output of each token is a value that the caller shares."""

    class Config(Linear.Config):
        pass

    def __call__(self, x):
        assert self.shared("other").shape == IDS.shape
        return np.ones(VOCAB) * self.shared("mark").values[..., None]


def test_shared_values_of_tokens_follow_the_tokens_whose_logits_are_computed():
    cfg = model(layers=1, head=Marked.Config())
    fn, params, state = ax.functional(cfg.build(rngs=ax.Rngs(0)))
    mark = np.arange(10, dtype=np.float32).reshape(2, 5)
    shared = {"mark": PerToken(mark), "other": mark}
    at = np.array([[3, 0], [1, 1]])
    found = fn(params, state, IDS, logits_at=at, shared=shared)[0][0]
    np.testing.assert_array_equal(found[..., 0], [[3, 0], [6, 6]])
    np.testing.assert_array_equal(fn(params, state, IDS, shared=shared)[0][0][..., 0], mark)


def test_a_transformer_layer_is_two_pre_norm_residual_blocks():
    cfg = LAYER.set(input_dim=DIM)
    params = parameters(cfg)
    expected = reference.transformer_layer(
        X.astype(np.float64), wide(params), HEADS, KV_HEADS, reference.causal(2, 5, SEGMENTS)
    )
    tokens = TokenInfo.of(IDS, POSITIONS, SEGMENTS)
    np.testing.assert_allclose(call(cfg, params, X, tokens)[0], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("layers", [1, 2, 3])
def test_repeat_applies_its_layers_in_order(layers):
    cfg = Repeat.Config(input_dim=DIM, num_layers=layers, layers=LAYER)
    params = parameters(cfg)
    x = X.astype(np.float64)
    for index in range(layers):
        p = layer_of(wide(params)["layers"], index)
        x = reference.transformer_layer(x, p, HEADS, KV_HEADS, reference.causal(2, 5))
    np.testing.assert_allclose(call(cfg, params, X, TOKENS)[0], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("unroll", [2, 3])
def test_unrolling_does_not_change_results(unroll):
    cfg = Repeat.Config(input_dim=DIM, num_layers=3, layers=LAYER)
    params, tokens = parameters(cfg), TOKENS
    expected = call(cfg, params, X, tokens)[0]
    np.testing.assert_allclose(call(cfg.set(unroll=unroll), params, X, tokens)[0], expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("segments", [None, SEGMENTS], ids=["one document in each row", "packed"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_logits_follow_the_formula(segments, tied):
    cfg = model(head=None) if tied else model()
    params = parameters(cfg)
    assert ("head" in params) is not tied
    output, _ = call(cfg, params, IDS, POSITIONS if segments is not None else None, segments)
    assert output.dtype == np.float32
    np.testing.assert_allclose(output, reference_logits(params, segments=segments), rtol=1e-4, atol=1e-5)


def test_a_token_does_not_change_earlier_logits():
    cfg = model()
    params = parameters(cfg)
    changed = IDS.copy()
    changed[:, 3] = (changed[:, 3] + 1) % VOCAB
    before, after = call(cfg, params, IDS)[0], call(cfg, params, changed)[0]
    np.testing.assert_array_equal(before[:, :3], after[:, :3])
    assert np.abs(before[:, 3:] - after[:, 3:]).max(axis=(0, 2)).min() > 1e-3


@pytest.mark.parametrize("z_loss", [0.0, 0.25])
def test_the_loss_is_a_weighted_mean_and_the_z_loss_is_separate(z_loss):
    cfg = model()
    params = parameters(cfg)
    loss, added = score(cfg, params, BATCH, z_loss=z_loss)
    expected, expected_z = reference_objective(params, z_loss=z_loss)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    assert list(added) == (["z_loss"] if z_loss else [])
    np.testing.assert_allclose(sum(added.values()), expected_z, rtol=1e-5)


def test_the_loss_of_packed_rows_uses_their_segments():
    cfg = model()
    params = parameters(cfg)
    batch = {**BATCH, "positions": POSITIONS, "segment_ids": SEGMENTS}
    loss, _ = score(cfg, params, batch)
    np.testing.assert_allclose(loss, reference_objective(params, batch)[0], rtol=1e-5)
    assert abs(loss - reference_objective(params)[0]) > 1e-3


@pytest.mark.parametrize("ignored", [-1, -100, VOCAB, 10**6])
def test_a_target_of_weight_zero_may_be_any_number(ignored):
    cfg = model()
    params = parameters(cfg)
    batch = {**BATCH, "targets": np.where(WEIGHTS > 0, BATCH["targets"], ignored).astype(np.int32)}
    loss, added = score(cfg, params, batch, z_loss=0.25)
    expected, expected_z = reference_objective(params, z_loss=0.25)
    np.testing.assert_allclose(loss, expected, rtol=1e-5)
    np.testing.assert_allclose(added["z_loss"], expected_z, rtol=1e-5)


def test_the_loss_stays_a_mean_when_weights_are_small():
    cfg = model()
    params = parameters(cfg)
    batch = {**BATCH, "weights": np.full((2, 5), 0.01, np.float32)}
    loss, added = score(cfg, params, batch, z_loss=0.25)
    expected, expected_z = reference_objective(params, batch, z_loss=0.25)
    np.testing.assert_allclose(loss, expected, rtol=1e-4)
    np.testing.assert_allclose(added["z_loss"], expected_z, rtol=1e-4)


def test_the_loss_is_zero_if_all_weights_are_zero():
    cfg = model()
    loss, added = score(cfg, parameters(cfg), {**BATCH, "weights": np.zeros((2, 5), np.float32)}, z_loss=0.25)
    assert loss == 0
    assert added["z_loss"] == 0


def test_label_smoothing_adds_the_mean_cross_entropy_of_the_vocabulary():
    cfg = model(pad_vocab_to=8)
    params = parameters(cfg)
    loss, added = score(cfg, params, BATCH, label_smoothing=0.2)
    logits = reference_logits(params)[..., :VOCAB]
    log_p = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = np.take_along_axis(log_p, BATCH["targets"][..., None], -1)[..., 0]
    labels = 0.8 * np.eye(VOCAB)[BATCH["targets"]] + 0.2 / VOCAB
    smoothed = -(labels * log_p).sum(-1)
    np.testing.assert_allclose(loss, -np.average(picked, weights=WEIGHTS), rtol=1e-5)
    np.testing.assert_allclose(loss + added["label_smoothing"], np.average(smoothed, weights=WEIGHTS), rtol=1e-5)


def gradients(cfg, params):
    return jax.device_get(jax.jit(jax.grad(minimized(cfg, z_loss=0.25)))(params, BATCH))


def moved(tree, path, by):
    """The tree with `by` added to the leaf at a path."""
    return jax.tree_util.tree_map_with_path(lambda at, leaf: leaf + by if at == path else leaf, tree)


@pytest.mark.parametrize(
    "options",
    [{}, {"head": None, "remat": Remat()}, {"remat": SaveMatmuls(), "unroll": 2}],
    ids=["plain", "tied, remat", "remat of all but matmuls, unrolled"],
)
def test_gradients_equal_the_slopes_of_the_float64_reference(options):
    decoder = {name: value for name, value in options.items() if name != "head"}
    head = {name: value for name, value in options.items() if name == "head"}
    cfg = ax.select(model(**head), Repeat).set(**decoder)
    params = parameters(cfg)
    grads, wide_params = gradients(cfg, params), wide(params)
    random = np.random.default_rng(0)
    step = 1e-5
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    for path, gradient in jax.tree.leaves_with_path(grads):
        direction = random.normal(size=gradient.shape)
        ahead, behind = (
            reference_objective(moved(wide_params, path, by * direction), z_loss=0.25) for by in (step, -step)
        )
        slope = (sum(ahead) - sum(behind)) / (2 * step)
        found = np.sum(gradient * direction)
        np.testing.assert_allclose(found, slope, rtol=2e-3, atol=1e-5, err_msg=jax.tree_util.keystr(path))


def test_every_parameter_has_as_many_axes_as_dimensions():
    fn, params, _ = shapes(model())
    jax.tree.map(lambda leaf, axes: None if len(axes) == leaf.ndim else pytest.fail(str(axes)), params, fn.axes)
    assert fn.axes["decoder"]["layers"]["ffn"]["up"]["weight"] == ("layer", "embed", "mlp")
    assert fn.axes["embedding"]["weight"] == ("vocab", "embed")
    assert fn.axes["head"]["weight"] == ("embed", "vocab")


def test_a_tied_model_has_no_head_parameter():
    assert "head" not in shapes(model(head=None))[1]


def test_a_stack_requires_a_layer():
    with pytest.raises(ax.ConfigError, match=r"num_layers must be at least 1, not 0"):
        shapes(model(layers=0))


@pytest.mark.parametrize("unroll", [1, 3])
def test_remat_saves_memory_in_scanned_and_unrolled_stacks(unroll):
    index = np.arange(48, dtype=np.int32)[None]

    def temporaries(remat):
        wide = ax.select(LAYER, FeedForward).set(hidden_dim=256)
        fn, params, _ = shapes(Repeat.Config(input_dim=16, num_layers=3, layers=wide, unroll=unroll, remat=remat))
        x = jax.ShapeDtypeStruct((8, 48, 16), np.float32)
        slope = jax.grad(lambda params, x: fn(params, {}, x, TokenInfo(index, index))[0][0].sum())
        return jax.jit(slope).lower(params, x).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(Remat()) < 0.6 * temporaries(None)


@pytest.mark.parametrize("name", ["targets", "weights"])
def test_a_batch_whose_arrays_would_broadcast_raises(name):
    cfg = model()
    with pytest.raises(ax.ConfigError, match=rf"the batch's {name} have the shape \(2, 1\)"):
        score(cfg, parameters(cfg), {**BATCH, name: BATCH[name][:, :1]})


def test_the_loss_of_an_invalid_target_is_nan_unless_its_weight_is_zero():
    cfg = model()
    targets = np.array(BATCH["targets"])
    targets[0, 0] = -1
    assert np.isnan(score(cfg, parameters(cfg), {**BATCH, "targets": targets})[0])
    weights = np.array(BATCH["weights"])
    weights[0, 0] = 0
    assert np.isfinite(score(cfg, parameters(cfg), {**BATCH, "targets": targets, "weights": weights})[0])
