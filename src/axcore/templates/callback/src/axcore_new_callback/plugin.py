"""What axcore-new-callback offers. Imports neither jax nor flax."""

from axcore.plugin import CallbackOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_callbacks() -> list[CallbackOffer]:
    target = "axcore_new_callback.patience:Patience"
    return [CallbackOffer("new-callback", target, "Ends a run that no longer improves.")]
