"""What axcore-new-grouped-matmul offers. Imports neither jax nor flax."""

from axcore.plugin import GroupedMatmulOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_grouped_matmuls() -> list[GroupedMatmulOffer]:
    target = "axcore_new_grouped_matmul.in_turn:InTurn"
    return [GroupedMatmulOffer("new-grouped-matmul", target, "Blocks of rows in turn, without copies of matrices.")]
