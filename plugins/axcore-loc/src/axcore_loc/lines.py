"""Counts lines of Python source: lines of code, changed lines, and lines that mention a name."""

from __future__ import annotations

import ast
import difflib
import functools
from collections.abc import Callable, Iterator

Mentions = dict[int, set[str]]
"""Line number -> the names that the line mentions."""


def code_lines(source: str) -> list[str]:
    """The lines of code without their indentation: no blank lines, comments or docstrings.

    Docstrings count if this version of Python cannot parse the source. A line of a multi-line string that begins with
    `#` counts as a comment.
    """
    docs = set(_docstring_lines(source))
    stripped = enumerate((line.strip() for line in source.splitlines()), start=1)
    return [line for number, line in stripped if line and not line.startswith("#") and number not in docs]


@functools.cache  # a grid of variants compares the same modules again and again
def changed_lines(before: str, after: str) -> int:
    """Number of lines of code added or removed between two versions of a module. A replaced line counts once."""
    matcher = difflib.SequenceMatcher(None, code_lines(before), code_lines(after), autojunk=False)
    return sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal")


def mentions(source: str, wanted: Callable[[str], bool]) -> Mentions:
    """The lines of code that mention a wanted name.

    Names come from the syntax tree: variables, attributes, arguments, keywords, definitions, imports (each part of a
    dotted module), and strings without spaces, such as config keys. Comments, docstrings and other text do not count.

    Raises:
        SyntaxError: this version of Python cannot parse the source.
    """
    tree = ast.parse(source)
    docs = {id(node) for node in _docstrings(tree)}
    found: Mentions = {}
    for node in ast.walk(tree):
        if id(node) in docs:
            continue
        for name, line in _names(node):
            if wanted(name):
                found.setdefault(line, set()).add(name)
    return found


def _names(node: ast.AST) -> Iterator[tuple[str, int]]:
    """The names in one node, each with its line."""
    match node:
        case ast.Name(id=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name, node.lineno
        case ast.Attribute(attr=name):
            yield name, node.end_lineno or node.lineno  # in a chain over several lines, the line of this name
        case ast.arg(arg=name):
            yield name, node.lineno
        case ast.keyword(arg=str(name)):
            yield name, node.lineno
        case ast.Constant(value=str(text)) if text and not any(map(str.isspace, text)):
            yield text, node.lineno
        case ast.alias(name=dotted, asname=other):
            yield from ((name, node.lineno) for name in (*dotted.split("."), other) if name)
        case ast.ImportFrom(module=str(dotted)):
            yield from ((name, node.lineno) for name in dotted.split("."))


def _docstrings(tree: ast.AST) -> Iterator[ast.Constant]:
    """String statements: docstrings of modules, classes, functions and fields."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value


def _docstring_lines(source: str) -> Iterator[int]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in _docstrings(tree):
        yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)
