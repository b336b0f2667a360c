"""What axcore-callbacks offers. Imports neither jax nor flax."""

from axcore.plugin import CallbackOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_callbacks() -> list[CallbackOffer]:
    return [
        CallbackOffer(
            "early-stopping",
            "axcore_callbacks.early_stopping:EarlyStopping",
            "Ends a run when a metric stops improving.",
        ),
        CallbackOffer("ema", "axcore_callbacks.ema:EMA", "An exponential moving average of the parameters."),
    ]
