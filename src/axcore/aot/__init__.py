"""Analysis of a config without running it: its module tree, explanations, and the cost of its compiled programs."""

import axcore.preflight  # noqa: F401 - before anything below imports flax
from axcore.aot.explain import Explanation, explain
from axcore.aot.module_tree import ModuleNode, Parameter, module_tree, tree
from axcore.aot.report import Report, compile_program
from axcore.aot.report_page import report_page
from axcore.aot.targets import Target
from axcore.aot.tree_page import tree_page

__all__ = [
    "Explanation",
    "ModuleNode",
    "Parameter",
    "Report",
    "Target",
    "compile_program",
    "explain",
    "module_tree",
    "report_page",
    "tree",
    "tree_page",
]


def __dir__() -> list[str]:
    return __all__
