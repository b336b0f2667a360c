"""`axcore rules`: the mesh rules, and what the rule for an accelerator does to a recipe."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from axcore.cli.compose import RECIPE_OR_FOLDER, Commands, add_edits, compose, edited
from axcore.cli.listing import table
from axcore.config import ConfigError, walk
from axcore.config.text import flatten
from axcore.plugin import Accelerator, MeshRule, mesh_rule, recipe_of, registry

if TYPE_CHECKING:
    from axcore.parallel import Layout


def add(commands: Commands) -> None:
    rules = commands.add_parser(
        "rules",
        help="list the mesh rules, or show what one does to a recipe",
        description="Without arguments, lists the mesh rules of all plugins. With a recipe and --target, shows the "
        "rule that applies and why, what it changes, the mesh, the microbatches and the check of the compiler options.",
    )
    rules.add_argument("recipe", nargs="?", help=RECIPE_OR_FOLDER)
    add_edits(rules)
    rules.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    targets = [index for index, (kind, _) in enumerate(arguments.edits) if kind == "target"]
    if arguments.recipe is None:
        if arguments.edits:
            raise ConfigError("axcore rules: --target requires a recipe: axcore rules llama2-7b --target gpu-h100-8")
        list_rules()
    elif not targets:
        raise ConfigError(
            f"axcore rules {arguments.recipe}: name the accelerator, as in --target gpu-h100-8. Without a recipe, "
            f"`axcore rules` lists the rules"
        )
    else:
        last = targets[-1]
        show_rule(arguments.recipe, arguments.edits[:last], arguments.edits[last][1], arguments.edits[last + 1 :])


def list_rules() -> None:
    rows = [
        (rule.pattern, rule.name, _limits(rule), rule.summary, plugin.distribution)
        for plugin, rule in registry().offers(MeshRule)
    ]
    none = "" if rows else f"no loaded plugin offers mesh rules; {registry().advice('mesh-rules')}"
    table(("accelerators", "mesh rule", "only for", "summary", "from"), rows, none)


def show_rule(name: str, before: list[tuple[str, str]], target: str, after: list[tuple[str, str]]) -> None:
    """Prints what the rule for `target` does to a recipe.

    Args:
        before, after: the edits that precede and follow `--target` on the command line.
    """
    from axcore.parallel import check_options

    accelerator = Accelerator.parse(target)
    recipe = compose(name, before)
    adapted = edited(recipe, [("target", target)])
    cfg = edited(adapted, after)
    layout = cfg.mesh.abstract(accelerator.count, accelerator.backend, accelerator.kind)
    options = check_options(cfg.compiler_options, _compiling(accelerator) or layout)
    schedule = layout.pipeline and layout.pipeline.table(layout.stages, cfg.microbatches)
    plugin, rule = mesh_rule(accelerator, recipe_of(recipe))
    groups = "slices" if accelerator.platform == "tpu" else "hosts"
    over = f" on {accelerator.hosts} {groups}" if accelerator.hosts > 1 else ""
    print(f"{target}: {accelerator.count} devices{over}")
    print(f"rule {rule.name} of {plugin}: {rule.summary}\n")
    table(("mesh rule", "accelerators", "only for", "from", "verdict"), _candidates(accelerator, recipe, rule), "")
    print("\nchanges by the rule:", *_changes(recipe, adapted), sep="\n")
    if after:
        print("\nchanges by the edits after --target:", *_changes(adapted, cfg), sep="\n")
    sizes = dict(layout.mesh.shape)
    print("\nmesh: " + ", ".join(f"{axis}={size}" for axis, size in sizes.items()))
    if accelerator.hosts > 1:
        slow = [axis for axis, factor in cfg.mesh.dcn.items() if factor > 1] or _crossing(sizes, accelerator.per_host)
        print(f"axes that span {groups}: {', '.join(slow) or 'none'}")
    print(_batch(cfg, layout))
    if schedule is not None:
        print(f"pipeline: each of the {layout.stages} stages is idle {schedule.idle:.1%} of the time")
    if options:
        print()
        rows = [(option.name, str(option.value), option.note) for option in options]
        table(("compiler option", "value", "check"), rows, "")


def _changes(old: Any, new: Any) -> Iterator[str]:
    """The changes of values that were set, in the order of the config. Leaves out the defaults of new nodes, and the
    fields of replaced nodes."""
    before, after = dict(walk(old)), dict(walk(new))
    replaced = [path for path in {**before, **after} if type(before.get(path)) is not type(after.get(path))]
    defaults = {path: flatten(type(after[path])()) for path in replaced if path in after}
    places = {path: place for place, path in enumerate({**flatten(new), **flatten(old)})}
    found = False
    for change in sorted(new.diff(old), key=lambda change: places.get(change.path, -1)):
        above = [path for path in replaced if change.path.startswith(f"{path}.")]
        defaulted = any(
            path in defaults and defaults[path].get(change.path[len(path) + 1 :]) == change.new for path in above
        )
        if above and (change.new is None or defaulted):
            continue
        found = True
        yield textwrap.fill(
            str(change),
            120,
            initial_indent="  ",
            subsequent_indent=" " * 6,
            break_long_words=False,
            break_on_hyphens=False,
        )
    if not found:
        yield "  none"


def _compiling(accelerator: Accelerator) -> Layout | None:
    """A layout on one device that this machine can compile for, if it is a TPU and libtpu is installed. The compiler of
    CPUs knows the options of GPUs."""
    from axcore.aot import Target
    from axcore.parallel import Mesh

    if accelerator.platform != "tpu":
        return None
    try:
        devices = Target.of(accelerator.text).devices()
    except ConfigError:
        return None
    return Mesh(shape={"data": 1}).make(devices[:1])


def _candidates(accelerator: Accelerator, recipe: Any, chosen: MeshRule) -> Iterator[tuple[str, ...]]:
    """A row for each rule whose pattern matches, the chosen one first."""
    found: list[tuple[tuple[float, ...], tuple[str, ...]]] = []
    for plugin, rule in registry().offers(MeshRule):
        if not rule.matches(accelerator):
            continue
        reason = rule.why_not(accelerator, recipe_of(recipe))
        verdict = "chosen" if rule == chosen else f"no: {reason}" if reason else _weaker(rule, chosen)
        found.append((rule.strength, (rule.name, rule.pattern, _limits(rule), str(plugin), verdict)))
    return (row for _, row in sorted(found, reverse=True))


def _weaker(rule: MeshRule, chosen: MeshRule) -> str:
    """Why a rule that applies is not the chosen one."""
    if rule.strength[0] < chosen.strength[0]:
        return f"less specific: {chosen.name} is for the recipes {chosen.recipe}"
    if rule.strength[1] < chosen.strength[1]:
        return f"less specific: {rule.pattern} has fewer literal characters than {chosen.pattern}"
    return f"less specific: {chosen.name} is for fewer numbers of devices"


def _limits(rule: MeshRule) -> str:
    """The numbers of devices and the recipes that a rule is limited to; empty if there is no limit."""
    recipes = "" if rule.recipe == "*" else f"recipes {rule.recipe}"
    return ", ".join(filter(None, (rule.range, recipes)))


def _crossing(sizes: dict[str, int], per_host: int) -> list[str]:
    """The mesh axes whose devices are on several hosts, if neighbouring devices are on one host."""
    inside, found = 1, []
    for axis, size in reversed(sizes.items()):
        inside *= size
        if size > 1 and inside > per_host:
            found.append(axis)
    return found[::-1]


def _batch(cfg: Any, layout: Layout) -> str:
    """How the rows of a batch are divided."""
    rows, count = getattr(cfg.input, "batch_size", None), layout.size_of(layout.axes_of("batch"))
    if not isinstance(rows, int):
        return f"microbatches: {cfg.microbatches}"
    if rows % (count * cfg.microbatches):
        return (
            f"batch: {rows} rows do not divide into {count} shards x {cfg.microbatches} microbatches. Set "
            f"input.batch_size to a multiple of {count * cfg.microbatches}"
        )
    each = rows // count // cfg.microbatches
    return f"batch: {rows} rows = {count} shards x {cfg.microbatches} microbatches x {each} rows"
