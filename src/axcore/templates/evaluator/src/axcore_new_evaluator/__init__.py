"""An evaluator that reports the accuracy of next-token prediction, for axcore."""
