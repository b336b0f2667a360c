"""What axcore-new-drafter offers. Imports neither jax nor flax."""

from axcore.plugin import DrafterOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_drafters() -> list[DrafterOffer]:
    target = "axcore_new_drafter.memory:Memory"
    return [DrafterOffer("new-drafter", target, "What followed the last tokens in earlier requests.")]
