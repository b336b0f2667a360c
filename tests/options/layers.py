"""Small layers and models. What is observed is the traced program: initialization, call and reports."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import axcore as ax
from axcore.config import Config
from axcore.infer import Decoder, Step
from axcore.module import functional
from axcore.nn import (
    And,
    Attention,
    Blocks,
    Causal,
    CausalLM,
    ChooseKernel,
    ClampedSwiGLU,
    ContiguousCache,
    Embedding,
    FeedForward,
    FirstSupported,
    FullWidthNorm,
    GroupedLinear,
    KernelRequest,
    LatentAttention,
    LayerNorm,
    Linear,
    MultiTokenPrediction,
    Normal,
    Or,
    ParallelLayer,
    PerHeadNorm,
    PostNormLayer,
    Prefix,
    ReferenceKernel,
    Repeat,
    RMSNorm,
    SameSegment,
    Scale,
    Sequence,
    SlidingWindow,
    TokenInfo,
    TransformerLayer,
    TunableKernel,
    Tuning,
    Zeros,
)
from axcore.nn.initializers import FanIn, ForEach
from axcore.nn.third_party import WIDTHS
from axcore.numerics import Numerics
from axcore.parallel import ByKind, ByTag, Mesh, Remat
from axcore.train import CrossEntropy
from axcore_cross_layer_kv.caches import borrowing, sharing
from axcore_cudnn.fp8_kernel import CudnnFp8Kernel
from axcore_cudnn.kernel import CudnnKernel
from axcore_diff_attention.kernel import DiffAttention
from axcore_fp8.fp8 import Fp8
from axcore_gemv.matmul import Gemv
from axcore_int8.int4 import Int4
from axcore_int8.int8 import Int8
from axcore_lora.layer import DoRA, LoRA
from axcore_lora.slots import LoRASlots
from axcore_mamba2.mixer import Mamba2
from axcore_mamba2.norm import GatedRMSNorm
from axcore_moe.balance import LoadBalance
from axcore_moe.dispatch import Capacity, Dense, Dropless
from axcore_moe.exchange import Exchange
from axcore_moe.layer import MoE
from axcore_moe.router import ExpertChoice, TopK
from axcore_mosaic_gpu.grouped import MosaicGrouped
from axcore_nki.kernel import NkiKernel
from axcore_paged_attention.kernel import PagedAttention
from axcore_paged_kv.cache import PagedCache
from axcore_recipes.short_conv import ConvTransformerLayer
from axcore_ring_kv.cache import RingCache
from axcore_rope import scaling
from axcore_rope.alibi import Alibi
from axcore_rope.learned import LearnedPositions
from axcore_rope.rotary import Rotary
from axcore_splash.kernel import SplashKernel

from .effects import Host

ROWS, SEQ, DIM = 2, 4, 8


def x(cfg: Config, *shape: int):
    """Activations as wide as the input of the layer."""
    return jax.ShapeDtypeStruct((*(shape or (ROWS, SEQ)), cfg.input_dim), jnp.float32)


IDS = jax.ShapeDtypeStruct((ROWS, SEQ), jnp.int32)
CACHE = ContiguousCache.Config()
DTYPES = ax.DTypes(param="float32", compute="bfloat16", accumulate="float32", output="float32")


def text(jaxpr):
    """A program as text: the jaxpr without addresses, and its constants."""
    constants = [
        np.asarray(jax.random.key_data(each) if jnp.issubdtype(each.dtype, jax.dtypes.prng_key) else each)
        for each in jaxpr.consts
        if hasattr(each, "dtype")
    ]
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), [(each.dtype.name, each.shape, each.tobytes()) for each in constants]


class Rounded(Numerics):
    """Rounds the weight."""

    class Config(Numerics.Config):
        pass

    def matrix(self, weight):
        return jnp.round(weight)


class Halved(ax.Layer):
    """Fills the slot `output` of attention."""

    uses_dtypes = False

    class Config(ax.Layer.Config):
        pass

    def __call__(self, x, heads):
        return heads / 2


class Tuned(TunableKernel):
    """Multiplies the heads by its block size."""

    uses_dtypes = False

    class Config(TunableKernel.Config):
        block: ax.PositiveInt | None = None

    def candidates(self, request):
        return ({"block": 5},)

    def __call__(self, inputs):
        return inputs.q * self.settings(KernelRequest.of(inputs))["block"], None


class Wide(nnx.Module):
    """Takes every width that a parent may pass."""

    def __init__(self, a: int, b: int, c: int, d: int, e: int, factor: float = 1.0):
        self.widths, self.factor = (a, b, c, d, e), factor

    def __call__(self, x):
        return x * sum(number * width for number, width in enumerate(self.widths)) * self.factor


def traced(*inputs, tokens=False, training=True, gradient=False, mesh=None, call=lambda layer, *args: layer(*args)):
    """Observes a layer: the program that initializes it and calls it on arrays of the shapes of `inputs`, which may
    depend on the config."""

    def observe(cfg: Config):
        axes = []

        def run(key, *args):
            fn, params, state = functional(cfg.build(rngs=ax.Rngs(key)))
            axes[:] = [fn.axes, fn.state_axes]
            if tokens:
                args = (*args, TokenInfo.of(args[0], segment_ids=jnp.ones(args[0].shape[:2], jnp.int32)))

            def value(params):
                (y, reports), new = fn(params, state, *args, key=key, training=training, method=call)
                return y, reports.scalars(), reports.weighted_losses(), new

            if not gradient:
                return params, state, value(params)
            y, back = jax.vjp(value, params)
            return params, state, back(jax.tree.map(jnp.ones_like, y))

        key = jax.eval_shape(lambda: jax.random.key(0))
        given = (each(cfg) if callable(each) else each for each in inputs)
        with mesh.active() if mesh is not None else contextlib.nullcontext():
            jaxpr, shape = jax.make_jaxpr(run, return_shape=True)(key, *given)
        return *text(jaxpr), str(shape), str(axes)

    return observe


def decoded(cfg: Config, cache: Config = CACHE):
    """Observes a language model whose caches are set: one step of decoding that writes to given slots."""
    layout = Mesh().abstract(1, "cpu")
    decoder, params, state = Decoder.abstract(
        cfg, cache=cache, batch_size=ROWS, max_len=SEQ, layout=layout, unstack=False
    )

    def step(params, state, ids, start, slots):
        return decoder(params, state, Step(ids, start=start, slots=slots))

    row = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    jaxpr, shape = jax.make_jaxpr(step, return_shape=True)(params, state, IDS, row, row)
    return *text(jaxpr), str(shape)


def heads(**fields):
    return Attention.Config(**{"input_dim": DIM, "num_heads": 2, "num_kv_heads": 1} | fields)


def ffn(**fields):
    return FeedForward.Config(**{"hidden_dim": 4} | fields)


def moe(**fields):
    cfg = {"input_dim": DIM, "num_experts": 4, "dispatch": Dropless(), "experts": MoE.Config().experts.set(block=ffn())}
    return MoE.Config(**cfg | fields)


def layer(cls=TransformerLayer.Config, **fields):
    return cls(**{"input_dim": DIM, "attention": heads(input_dim=ax.REQUIRED), "ffn": ffn()} | fields)


def model(**fields):
    decoder = Repeat.Config(num_layers=2, layers=layer(input_dim=ax.REQUIRED))
    return CausalLM.Config(**{"vocab_size": 12, "dim": DIM, "decoder": decoder} | fields)


def rotary(**fields):
    return heads(position=Rotary.Config(**fields))


TOKENS = traced(x, tokens=True)


def wide(cfg: Config):
    return jax.ShapeDtypeStruct((ROWS, SEQ, cfg.num_heads, cfg.head_dim), jnp.float32)


def hosts():
    """Each class is in at least one host."""
    yield from blocks()
    yield from attention()
    yield from mixtures()
    yield from stacks()
    yield from decoding()


def blocks():
    plain = traced(x)
    linear = {"input_dim": DIM, "output_dim": 6, "use_bias": True, "axes": ("embed", "mlp"), "init": FanIn()}
    yield Host(Linear.Config(**linear, dtypes=DTYPES), plain)
    hopper = Mesh().abstract(1, "gpu", "NVIDIA H100")
    single = Linear.Config(**linear | {"output_dim": 8192}, matmul=Gemv())
    yield Host(single, traced(lambda cfg: x(cfg, 1, 1), mesh=hopper), "matmul")
    yield Host(Linear.Config(**linear, numerics=Rounded.Config()), plain)
    yield Host(Linear.Config(**linear, numerics=Fp8.Config()), plain, "numerics")
    delayed = Fp8.Config(scaling="delayed", amax_history_len=4)
    yield Host(Linear.Config(**linear, numerics=delayed), plain, "numerics", ("amax_history_len",))
    yield Host(Linear.Config(**linear | {"init": ForEach(init=FanIn())}, numerics=Numerics.Config()), plain)
    for made in (Int8.Config(), Int8.Config(activation_scales="static"), Int4.Config()):
        yield Host(Linear.Config(**linear | {"input_dim": 65}, numerics=made), traced(x, gradient=True))
    for adapter in (LoRA, DoRA):
        yield Host(Linear.Config(**linear, adapter=adapter.Config(rank=2, dropout=0.1)), plain)
    yield Host(Linear.Config(**linear, adapter=LoRASlots.Config(slots=2, rank=2)), plain)
    yield Host(
        GroupedLinear.Config(
            groups=2,
            numerics=Rounded.Config(),
            adapter=LoRA.Config(rank=2),
            **linear | {"axes": ("expert", "embed", "mlp")},
        ),
        traced(lambda cfg: x(cfg, cfg.groups, 3), call=lambda layer, x: layer.batched(x)),
    )
    embedding = {"vocab_size": 12, "output_dim": DIM}
    yield Host(Embedding.Config(**embedding, scale=2.0, init=Normal(), numerics=Rounded.Config()), traced(IDS))
    yield Host(ffn(input_dim=DIM, dropout=0.1), plain)
    yield Host(ffn(input_dim=DIM, gating=ClampedSwiGLU()), plain)
    for norm in (RMSNorm, LayerNorm, Scale):
        yield Host(norm.Config(input_dim=DIM, axes=("embed",)), plain)
    for norm in (FullWidthNorm, PerHeadNorm):
        yield Host(norm.Config(num_heads=2, head_dim=DIM), traced(wide))
    yield Host(GatedRMSNorm.Config(input_dim=DIM, groups=2), traced(x, x))
    widths = dict(zip("abcde", WIDTHS, strict=True))
    yield Host(ax.stock(Wide, widths=widths, factor=2.0).set(**dict.fromkeys(WIDTHS, DIM)), plain)


def attention():
    mask = And(masks=(Causal(), Or(masks=(SlidingWindow(size=2), Prefix(size=1), SameSegment()))))
    filled = {"mask": mask, "sinks": Zeros(), "dropout": 0.1, "softcap": 3.0, "bias": Alibi.Config()}
    yield Host(heads(position=Rotary.Config(), output=Halved.Config(), **filled), TOKENS)
    yield Host(heads(query_norm=RMSNorm.Config(), key_norm=RMSNorm.Config()), TOKENS)
    yield Host(heads(query=None, key=None, value=None, qkv=Linear.Config()), TOKENS)
    yield Host(ffn(input_dim=DIM, gate=None, up=None, gate_up=Linear.Config()), traced(x))
    kernel = DiffAttention.Config(num_heads=ax.REQUIRED)
    yield Host(heads(num_kv_heads=2, kernel=ChooseKernel.Config(order=(ReferenceKernel.Config(), kernel))), TOKENS)
    yield Host(heads(num_kv_heads=2, kernel=kernel), TOKENS)
    measured = {"train float32 4:4x2:1x4:4 Causal() & SameSegment() packed": {"block": 2}}
    tuning = Tuning(device_kind="cpu", settings=measured)
    yield Host(heads(kernel=Tuned.Config(tuning=tuning)), TOKENS)
    # The NKI kernel requires Trainium and a library of AWS, so the other kernel runs.
    yield Host(heads(kernel=ChooseKernel.Config(order=(NkiKernel.Config(), ReferenceKernel.Config()))), TOKENS)
    for kind in (
        scaling.Linear(factor=2.0),
        scaling.DynamicNTK(factor=2.0, original_max=2),
        scaling.Llama3(factor=4.0, original_max=64),
        scaling.YaRN(factor=4.0, original_max=64, mscale=1.0, mscale_all_dim=0.5),
        scaling.YaRN(factor=4.0, original_max=64),
        scaling.LongRoPE(short=(1.0,) * 8, long=(2.0,) * 8, original_max=2),
    ):
        yield Host(heads(head_dim=16, position=Rotary.Config(theta=100.0, scaling=kind)), TOKENS)
    latent = {"kv_lora_rank": 4, "q_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "value_dim": 4}
    slots = {"position": Rotary.Config(), "output": Halved.Config(), **filled}
    yield Host(LatentAttention.Config(input_dim=DIM, num_heads=2, **latent, **slots), TOKENS)
    gpu = traced(x, tokens=True, mesh=Mesh().abstract(1, "gpu", "NVIDIA H100"))
    half = ax.DTypes(compute="bfloat16")
    yield Host(heads(head_dim=16, kernel=CudnnKernel.Config(), dtypes=half), gpu)
    evaluation = traced(
        lambda cfg: x(cfg, 1, 128), tokens=True, training=False, mesh=Mesh().abstract(1, "gpu", "NVIDIA H100")
    )
    kernel = CudnnFp8Kernel.Config()
    yield Host(heads(head_dim=128, mask=Causal(), kernel=kernel, dtypes=half), evaluation, at="kernel")
    tpu = traced(lambda cfg: x(cfg, 1, 512), tokens=True, gradient=True, mesh=Mesh().abstract(1, "tpu"))
    for blocks in ({"block_kv": 256, "block_kv_dkv": 256}, {}):
        yield Host(heads(head_dim=16, kernel=SplashKernel.Config(**blocks)), tpu, at="kernel")
    measured = {"train float32 512:512x2:1x16:16 Causal() & SameSegment() packed": {"block_q": 256}}
    kernel = SplashKernel.Config(tuning=Tuning(device_kind="", settings=measured))
    yield Host(heads(head_dim=16, kernel=kernel), tpu, at="kernel", fields=("tuning",))
    yield Host(Mamba2.Config(input_dim=DIM, state_dim=4, head_dim=4, chunk=2), TOKENS)


def mixtures():
    for dispatch in (Dropless(), Dense(), Capacity()):
        yield Host(moe(dispatch=dispatch), TOKENS)
    yield Host(moe(dispatch=Dropless(matmul=FirstSupported(order=(Blocks(size=2), Blocks())))), TOKENS)
    tpu = Mesh(shape={"expert": 4}).abstract(4, "tpu")
    yield Host(moe(dispatch=Exchange()), traced(x, tokens=True, mesh=tpu))
    hopper = traced(x, tokens=True, gradient=True, mesh=Mesh().abstract(1, "gpu", "NVIDIA H100"))
    wide = MoE.Config().experts.set(block=FeedForward.Config(hidden_dim=64))
    dispatch, half = Dropless(matmul=MosaicGrouped()), ax.DTypes(compute="bfloat16")
    yield Host(moe(input_dim=64, experts=wide, dispatch=dispatch, dtypes=half), hopper, at="dispatch.matmul")
    yield Host(moe(shared=ffn(), shared_gate=Linear.Config(), balance=LoadBalance(weight=0.1), z_loss=0.1), TOKENS)
    yield Host(moe(router=TopK.Config(jitter=0.1, bias_rate=0.1, groups=2, top_groups=1)), TOKENS)
    yield Host(moe(router=ExpertChoice.Config(jitter=0.1)), TOKENS)


def stacks():
    after = {"attention_output_norm": RMSNorm.Config(), "ffn_output_norm": RMSNorm.Config()}
    yield Host(layer(**after, dropout=0.1), TOKENS)
    yield Host(layer(PostNormLayer.Config, dropout=0.1), TOKENS)
    norm = ax.stock(nnx.LayerNorm, widths={"num_features": "input_dim"}, use_bias=False)
    yield Host(layer(ParallelLayer.Config, ffn_norm=norm, dropout=0.1), TOKENS)
    yield Host(layer(ConvTransformerLayer.Config, **after, dropout=0.1), TOKENS)
    backward, inner = traced(x, tokens=True, gradient=True), layer(input_dim=ax.REQUIRED)
    for remat in (
        ByTag(save=("query", "value"), offload=("key",), recompute=("value",)),
        ByKind(kinds={"Attention": Remat()}, others=None),
        ByKind(kinds={}, others=Remat()),
    ):
        yield Host(Repeat.Config(input_dim=DIM, num_layers=2, layers=inner, remat=remat), backward, at="remat")
    for stack in (
        Repeat.Config(input_dim=DIM, num_layers=2, layers=inner),
        Sequence.Config(input_dim=DIM, layers=(inner,)),
    ):
        yield Host(stack, backward, fields=("remat",))
        yield Host(stack, TOKENS)
    measured = {"prefill float32 4:4x2:1x4:4 Causal() & SameSegment() partial InCache": {"splits": 3}}
    tuning = Tuning(device_kind="", settings=measured)
    attention = inner.attention.set(kernel=PagedAttention.Config(interpret=True, tuning=tuning))
    decoder = Repeat.Config(num_layers=2, layers=inner.set(attention=attention))
    yield Host(model(decoder=decoder), decoded, at="decoder.layers.attention.kernel")
    shared = [inner.set(attention=each(inner.attention, "kv")) for each in (sharing, borrowing)]
    yield Host(Sequence.Config(input_dim=DIM, layers=tuple(shared)), TOKENS)
    yield Host(model(position=LearnedPositions.Config(max_len=SEQ), dropout=0.1, softcap=2.0), traced(IDS))
    further = MultiTokenPrediction.Config(layer=inner)
    yield Host(model(future=(further,)), whole)


def decoding():
    cache, inner = ContiguousCache.Config(batch_size=ROWS, max_len=SEQ), layer(input_dim=ax.REQUIRED)
    latent = LatentAttention.Config(
        num_heads=2, kv_lora_rank=4, qk_nope_head_dim=4, qk_rope_head_dim=2, value_dim=4, cache=cache
    )
    for each in (CACHE, PagedCache.Config(page_size=2), PagedCache.Config(page_size=2, num_pages=6)):
        yield Host(each, caching)
    window = layer(input_dim=ax.REQUIRED, attention=heads(input_dim=ax.REQUIRED, mask=Causal() & SlidingWindow(size=2)))
    yield Host(RingCache.Config(window=2, spare=1), lambda cfg: decoded(model(decoder=window), cfg))
    for attention in (inner.attention.set(cache=cache), latent, Mamba2.Config(head_dim=4, batch_size=ROWS)):
        yield Host(model(decoder=Repeat.Config(num_layers=2, layers=inner.set(attention=attention))), decoded)
    measured = {"prefill float32 4:4x2:1x4:4 Causal() & SameSegment() partial InCache": {"splits": 3}}
    tuning = Tuning(device_kind="", settings=measured)
    attention = inner.attention.set(kernel=PagedAttention.Config(interpret=True, tuning=tuning))
    decoder = Repeat.Config(num_layers=2, layers=inner.set(attention=attention))
    yield Host(model(decoder=decoder), decoded, at="decoder.layers.attention.kernel")
    shared = [inner.set(attention=each(inner.attention, "kv")) for each in (sharing, borrowing)]
    held = shared[0].attention.cache.set(cache=cache)
    first = shared[0].set(attention=shared[0].attention.set(cache=held))
    yield Host(model(decoder=Sequence.Config(layers=(first, shared[1]))), decoded)
    conv = layer(ConvTransformerLayer.Config, input_dim=ax.REQUIRED)
    yield Host(model(decoder=Sequence.Config(layers=(conv.set(conv=conv.conv.set(batch_size=ROWS)),))), decoded)


def caching(cfg: Config):
    """Observes a language model whose caches are set by the decoder."""
    return decoded(model(decoder=layer(input_dim=ax.REQUIRED)), cfg)


def whole(cfg: Config):
    """Observes the training loss of a language model."""
    batch = {name: IDS for name in ("inputs", "targets")} | {"weights": jax.ShapeDtypeStruct(IDS.shape, jnp.float32)}
    return traced(batch, call=lambda model, batch: CrossEntropy.Config().build()(model, batch))(cfg)
