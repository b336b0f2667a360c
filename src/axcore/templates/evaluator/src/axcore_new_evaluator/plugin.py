"""What axcore-new-evaluator offers. Imports neither jax nor flax."""

from axcore.plugin import EvaluatorOffer, hookimpl

axcore_api = 2


@hookimpl
def axcore_evaluators() -> list[EvaluatorOffer]:
    target = "axcore_new_evaluator.accuracy:Accuracy"
    return [EvaluatorOffer("new-evaluator", target, "Accuracy on the validation text.")]
