"""Exceptions that plugins declare with attributes of their suites."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable


def check_declared(attribute: str, patterns: tuple[str, ...], found: Iterable[str], consequence: str) -> None:
    """Checks that the patterns of an attribute match all names found, and that each pattern matches at least one.

    Args:
        attribute: the name of the attribute of the suite.
        patterns: its value.
        found: the paths of arrays.
        consequence: what is wrong with an array that no pattern matches.
    """
    found = list(found)
    undeclared = [name for name in found if not any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)]
    assert not undeclared, f"{consequence}: {undeclared}. If this is meant, declare it with the attribute {attribute}"
    unused = [pattern for pattern in patterns if not fnmatch.filter(found, pattern)]
    assert not unused, f"{attribute} contains {unused}, which matches no such array; found: {found}"
