"""Finds the config fields that code reads, from its syntax trees."""

import ast
import collections
import functools
import inspect
import sys

from axcore.config import Config, Configurable

HOLDERS = ("cfg", "config", "_cfg", "_config")
"""Names of variables and attributes that hold a config."""


@functools.cache
def source(module):
    """The syntax tree of a module."""
    return ast.parse(inspect.getsource(sys.modules[module]))


@functools.cache
def methods(cls):
    """The functions that the body of a class defines, by name."""
    body = source(cls.__module__).body
    for name in cls.__qualname__.split("."):
        body = next((each.body for each in body if isinstance(each, ast.ClassDef) and each.name == name), ())
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef)}


def effective(cls):
    """The methods that run for an instance of a class: the innermost of each name, and those that it calls by super."""
    kinds = [kind for kind in cls.__mro__ if issubclass(kind, Config | Configurable)]
    for name in {name for kind in kinds for name in methods(kind)}:
        for kind in kinds:
            if name in methods(kind):
                yield methods(kind)[name]
                if not any(isinstance(each, ast.Name) and each.id == "super" for each in ast.walk(methods(kind)[name])):
                    break


def is_config(node):
    """Whether an expression is `cfg`, `self.config` or the like."""
    if isinstance(node, ast.Attribute):
        return node.attr in HOLDERS and isinstance(node.value, ast.Name) and node.value.id == "self"
    return isinstance(node, ast.Name) and node.id in HOLDERS


def is_name(name):
    return lambda node: isinstance(node, ast.Name) and node.id == name


def attributes(function, holds):
    """The attributes that a function reads of the expressions for which `holds` is true. If it reads an attribute by a
    variable name, all strings in it are included."""
    for node in ast.walk(function):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and holds(node.value):
            yield node.attr
        if isinstance(node, ast.Call) and is_name("getattr")(node.func) and holds(node.args[0]):
            within = node.args[1] if isinstance(node.args[1], ast.Constant) else function
            yield from (each.value for each in ast.walk(within) if isinstance(each, ast.Constant))


@functools.cache
def by_annotation(module):
    """class -> the attributes that functions of a module read of arguments that are annotated with its config. A
    constructor may keep the config as an attribute."""
    found = collections.defaultdict(set)
    owners = {below: node for node in ast.walk(source(module)) if isinstance(node, ast.ClassDef) for below in node.body}
    for function in ast.walk(source(module)):
        if isinstance(function, ast.FunctionDef):
            for argument in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]:
                if argument.annotation is not None:
                    read = set(attributes(function, is_name(argument.arg)))
                    if function.name == "__init__" and argument.arg in HOLDERS:
                        read |= set(attributes(owners[function], is_config))
                    for kind in ast.unparse(argument.annotation).split("|"):
                        found[kind.strip().removesuffix(".Config").rpartition(".")[2]] |= read
    return found


def reads(cls, modules):
    """The attributes that code reads of a config of class `cls`: its own methods, those of the class that it builds,
    and functions of the modules with an argument annotated with the class."""
    found = {attribute for function in effective(cls) for attribute in attributes(function, is_name("self"))}
    if cls.target is not None:
        found |= {attribute for function in effective(cls.target) for attribute in attributes(function, is_config)}
    names = {(each.target or each).__name__ for each in cls.__mro__ if issubclass(each, Config) and each is not Config}
    return found.union(*(by_annotation(module)[name] for module in modules for name in names))
