"""Analysis of a config without running it: its module tree, explanations, and the cost of its compiled step."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.aot.explain import Explanation, explain
from axcore.aot.module_tree import ModuleNode, Parameter, module_tree, tree
from axcore.aot.report import StepReport, compile_step
from axcore.aot.tree_page import tree_page

__all__ = [
    "Explanation",
    "ModuleNode",
    "Parameter",
    "StepReport",
    "compile_step",
    "explain",
    "module_tree",
    "tree",
    "tree_page",
]


def __dir__() -> list[str]:
    return __all__
