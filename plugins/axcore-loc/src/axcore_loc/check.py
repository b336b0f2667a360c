"""`axcore loc check`: the lines of existing modules that a change edits in order to add a feature."""

from __future__ import annotations

import ast
import dataclasses
import tomllib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from axcore.plugin import Command, Recipe
from axcore.plugin.offers import OFFERS
from axcore_loc.git import Reader, Repository
from axcore_loc.lines import changed_lines

FEATURES = frozenset(kind.__name__ for kind in OFFERS.values() if kind not in (Recipe, Command))
"""Kinds of offers that extend a model or its training. Recipes and commands do not."""

GUARDED = {"nn": "src/axcore/nn/", "recipes": "recipes/src/"}
"""Owners whose modules a feature must not change, and the folders of these modules."""


@dataclasses.dataclass(frozen=True)
class Touched:
    """An existing module and its changed lines of code."""

    path: str
    owner: str
    lines: int


@dataclasses.dataclass(frozen=True)
class Check:
    """The features that a change adds, and the lines that it changes in existing modules.

    Attributes:
        base: the commit to compare with.
        features: (kind, name, offering module) of each new offer.
        touched: existing modules with changed lines of code, in descending order.
        budget: number of lines that may change in guarded modules.
    """

    base: str
    features: tuple[tuple[str, str, str], ...]
    touched: tuple[Touched, ...]
    budget: int

    @property
    def guarded_lines(self) -> int:
        return sum(each.lines for each in self.touched if each.owner in GUARDED)

    @property
    def passes(self) -> bool:
        return not self.features or self.guarded_lines <= self.budget

    def by_owner(self) -> dict[str, int]:
        lines: dict[str, int] = dict.fromkeys(GUARDED, 0)
        for each in self.touched:
            lines[each.owner] = lines.get(each.owner, 0) + each.lines
        return lines

    def as_json(self) -> dict[str, Any]:
        return {
            "base": self.base,
            "features": [{"kind": kind, "name": name, "offered_by": path} for kind, name, path in self.features],
            "lines": self.by_owner(),
            "touched": [dataclasses.asdict(each) for each in self.touched],
            "budget": self.budget,
            "guarded_lines": self.guarded_lines,
            "passes": self.passes,
        }

    def as_text(self) -> str:
        if not self.features:
            return f"no feature is added since {self.base[:12]}; nothing to check"
        added = ", ".join(f"{name} ({kind})" for kind, name, _ in self.features)
        lines = [f"added since {self.base[:12]}: {added}", "", "lines changed in existing modules:"]
        for owner, count in self.by_owner().items():
            lines.append(f"{count:8d}  {owner}")
            lines += [f"          {each.lines:6d}  {each.path}" for each in self.touched if each.owner == owner]
        verdict = "within" if self.passes else "OVER"
        lines += ["", f"{' and '.join(GUARDED)}: {self.guarded_lines} lines, {verdict} the budget of {self.budget}"]
        if not self.passes:
            lines.append(
                "A feature attaches from outside. If the core lacks an extension point, add it in a separate change. "
                "Otherwise pass --budget N and explain why."
            )
        return "\n".join(lines)


def check(folder: Path, base: str, budget: int = 0) -> Check:
    """Compares the working tree with a commit.

    Raises:
        GitError: the commit cannot be reached.
    """
    repository = Repository.at(folder, base)
    before = {offer[:2] for offer in offers(repository.base_files(), repository.base_text)}
    new = tuple(offer for offer in offers(repository.now_files(), repository.now_text) if offer[:2] not in before)
    touched = []
    for old, now in repository.changed():
        if old.endswith(".py"):
            lines = changed_lines(repository.base_text(old), repository.now_text(now) if now else "")
            if lines:
                touched.append(Touched(old, owner(old, [path for _, _, path in new]), lines))
    touched.sort(key=lambda each: (-each.lines, each.path))
    return Check(repository.base, new, tuple(touched), budget)


def offers(files: Iterable[str], read: Reader) -> Iterator[tuple[str, str, str]]:
    """(kind, name, module) of each feature that the distributions in `files` offer, according to their sources.

    A distribution is a folder with a `pyproject.toml` that is not inside another one's `src` (a template). Its modules
    are those of its entry points. An offer counts if its name is a literal.
    """
    known = set(files)
    for file in sorted(path for path in known if PurePosixPath(path).name == "pyproject.toml"):
        folder = PurePosixPath(file).parent
        if "src" in folder.parts:
            continue
        for module in _entry_points(read(file)):
            below = module.replace(".", "/")
            candidates = [f"{part}{below}{end}" for part in ("src/", "") for end in (".py", "/__init__.py")]
            found = next((path for each in candidates if (path := str(folder / each)) in known), None)
            if found:
                yield from ((kind, name, found) for kind, name in _offered(read(found)))


def owner(path: str, offering: Collection[str]) -> str:
    """The owner of a module of the repository, given the modules with new offers."""
    pure = PurePosixPath(path)
    if "tests" in pure.parts:
        return "tests"
    if path in offering:  # each new offer extends the list of offers
        return "the plugin itself"
    for name, folder in GUARDED.items():
        if path.startswith(folder):
            return name
    if path.startswith("src/axcore/"):
        return "rest of the core"
    if not path.startswith(("plugins/", "plugins_kernels/")):
        return "other"
    distributions = {PurePosixPath(each).parts[:2] for each in offering}
    return "the plugin itself" if pure.parts[:2] in distributions else "other plugins"


def _entry_points(pyproject: str) -> list[str]:
    try:
        table = tomllib.loads(pyproject).get("project", {}).get("entry-points", {}).get("axcore.plugins", {})
    except tomllib.TOMLDecodeError:
        return []
    return [value.partition(":")[0].strip() for value in table.values()]


def _offered(source: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=kind) | ast.Attribute(attr=kind)) if kind in FEATURES:
                named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
                match [*node.args[:1], *named]:
                    case [ast.Constant(value=str(name)), *_]:
                        yield kind, name
