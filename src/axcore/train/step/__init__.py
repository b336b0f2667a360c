"""A training step: its program, objective, learner and gradient accumulation."""
