"""What axcore-int8 offers. Imports neither jax nor flax."""

from axcore.plugin import Command, Feature, NumericsOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_numerics() -> list[NumericsOffer]:
    return [
        NumericsOffer("int8", "axcore_int8.int8:Int8", "INT8 products for training and inference, or INT8 weights."),
        NumericsOffer("int4", "axcore_int8.int4:Int4", "INT4 weights in groups along the input axis."),
    ]


@hookimpl
def axcore_features() -> list[Feature]:
    return [
        Feature("int8", "axcore_int8.features:use_int8", "INT8 products in all layers but the first and the last."),
        Feature("int4", "axcore_int8.features:use_int4", "INT4 weights in all layers."),
    ]


@hookimpl
def axcore_commands() -> list[Command]:
    return [
        Command("quantize", "axcore_int8.commands:quantize", "Store the weights of a trained model as INT8 or INT4.")
    ]
