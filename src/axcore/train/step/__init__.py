"""One training step: the program, objective, learner, accumulation."""
