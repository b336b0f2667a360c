"""Before anything runs: the module tree of a config, and what its compiled step needs."""

from axcore.aot.module_tree import ModuleNode, Parameter, module_tree
from axcore.aot.report import StepReport, compile_step
from axcore.aot.tree_page import tree_page

__all__ = ["ModuleNode", "Parameter", "StepReport", "compile_step", "module_tree", "tree_page"]
