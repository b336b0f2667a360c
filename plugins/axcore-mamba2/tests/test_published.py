"""Outputs and gradients against `transformers` with the same weights. Skipped if it or torch is not installed."""

import jax
import numpy as np
import pytest

from axcore.module import abstract
from axcore.nn import TokenInfo
from axcore_mamba2.mixer import Mamba2

torch = pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.24")  # earlier versions normalize over all groups together
published = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")

DIM, STATE_DIM, HEAD_DIM, NUM_HEADS = 32, 16, 16, 4
INNER = NUM_HEADS * HEAD_DIM


def renamed(weights, num_groups):
    """The parameters of `Mamba2` from those of a published checkpoint."""
    weights = {name: value.detach().numpy() for name, value in weights.items()}
    shared = num_groups * STATE_DIM
    into = np.split(weights["in_proj.weight"].T, np.cumsum([INNER, INNER, shared, shared]), axis=1)
    cuts = np.cumsum([INNER, shared])
    taps, biases = np.split(weights["conv1d.weight"][:, 0].T, cuts, axis=1), np.split(weights["conv1d.bias"], cuts)
    return {
        **{f"{name}_proj": {"weight": value} for name, value in zip(("z", "x", "B", "C", "dt"), into, strict=True)},
        **{
            f"{name}_conv": {"weight": weight, "bias": bias}
            for name, weight, bias in zip("xBC", taps, biases, strict=True)
        },
        **{name: weights[name] for name in ("A_log", "dt_bias", "D")},
        "norm": {"scale": weights["norm.weight"]},
        "out_proj": {"weight": weights["out_proj.weight"].T},
    }


@pytest.mark.parametrize("num_groups", [1, 2])
def test_outputs_and_gradients_match_transformers(num_groups):
    torch.manual_seed(0)
    theirs = published.Mamba2Mixer(
        published.Mamba2Config(
            hidden_size=DIM,
            state_size=STATE_DIM,
            head_dim=HEAD_DIM,
            num_heads=NUM_HEADS,
            n_groups=num_groups,
            chunk_size=16,
            layer_norm_epsilon=1e-5,
            num_hidden_layers=1,
        ),
        layer_idx=0,
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter) if parameter.ndim == 1 else 0.0)
    x, cotangent = torch.randn(2, 37, DIM, requires_grad=True), torch.randn(2, 37, DIM)
    y = theirs(x)
    (y * cotangent).sum().backward()

    cfg = Mamba2.Config(input_dim=DIM, state_dim=STATE_DIM, head_dim=HEAD_DIM, num_groups=num_groups, chunk=16)
    fn, shapes, _ = abstract(cfg)
    params = renamed(dict(theirs.named_parameters()), num_groups)
    assert jax.tree.map(np.shape, params) == jax.tree.map(np.shape, shapes)
    tokens = TokenInfo.of(np.zeros((2, 37), np.int32))
    ours, pull = jax.vjp(jax.jit(lambda params, x: fn(params, {}, x, tokens)[0][0]), params, x.detach().numpy())
    grads, dx = pull(cotangent.numpy())

    expected = renamed({name: value.grad for name, value in theirs.named_parameters()}, num_groups)
    pairs = [(ours, y.detach().numpy()), (dx, x.grad.numpy())]
    pairs += zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True)
    for found, wanted in pairs:
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4 * np.abs(wanted).max())
