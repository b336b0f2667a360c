"""The planner: how to run a training step on an accelerator that need not be there."""

from axcore.aot.plan.search import Choice as Choice, Plan as Plan, plan as plan
