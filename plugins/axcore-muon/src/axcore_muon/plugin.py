"""What axcore-muon offers. Imports neither jax nor flax."""

from axcore.plugin import Feature, OptimizerOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_optimizers() -> list[OptimizerOffer]:
    return [OptimizerOffer("muon", "axcore_muon.optimizer:Muon", "Orthogonalized momentum for matrices.")]


@hookimpl
def axcore_features() -> list[Feature]:
    return [
        Feature("muon", "axcore_muon.optimizer:use_muon", "Muon for matrices; other parameters keep their optimizer.")
    ]
