"""The module tree as a self-contained HTML page."""

from __future__ import annotations

import html

from axcore.aot.module_tree import ModuleNode
from axcore.config.memory import size

_STYLE = """
:root { color-scheme: light dark; --muted: #777; --line: #8884; --accent: #3567b8; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
header { display: flex; gap: 1rem; align-items: baseline; flex-wrap: wrap; }
input { font: inherit; padding: .3rem .6rem; flex: 1; min-width: 14rem; }
button { font: inherit; padding: .3rem .6rem; }
details { margin-left: 1.1rem; border-left: 1px solid var(--line); padding-left: .5rem; }
summary, .parameter { display: flex; gap: .8rem; padding: .1rem 0; cursor: pointer; }
summary:hover, .parameter:hover { background: #8881; }
.parameter { margin-left: 1.1rem; padding-left: 2.1rem; cursor: default; color: var(--muted); }
summary::before { content: "\\25b8"; width: .8rem; } details[open] > summary::before { content: "\\25be"; }
summary:only-child { cursor: default; } summary:only-child::before { visibility: hidden; }
main > .parameter { position: sticky; top: 0; background: Canvas; border-bottom: 1px solid var(--line); margin: 0; }
.kind { color: var(--accent); } .settings { color: var(--muted); }
.count { margin-left: auto; font-variant-numeric: tabular-nums; }
.size, .supplier { width: 9rem; text-align: right; color: var(--muted); } .hidden { display: none; }
code { font-family: ui-monospace, monospace; }
"""

_SCRIPT = """
const box = document.querySelector('input'), rows = [...document.querySelectorAll('[data-path]')];
const shown = document.querySelector('#shown');
function filter() {
  const words = box.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const hits = rows.filter(row => words.every(word => row.dataset.path.includes(word)));
  rows.forEach(row => row.classList.toggle('hidden', words.length > 0));
  for (const hit of hits) {
    hit.classList.remove('hidden');
    if (words.length) hit.querySelectorAll('[data-path]').forEach(row => row.classList.remove('hidden'));
    for (let above = hit.parentElement.closest('details'); above; above = above.parentElement.closest('details')) {
      above.classList.remove('hidden'); if (words.length) above.open = true;
    }
  }
  shown.textContent = words.length ? hits.length + ' of ' + rows.length + ' match' : rows.length + ' rows';
}
box.addEventListener('input', filter);
const fold = open => document.querySelectorAll('details').forEach(node => node.open = open);
document.querySelector('#open').onclick = () => fold(true);
document.querySelector('#close').onclick = () => fold(false);
filter();
"""


def tree_page(tree: ModuleNode, *, title: str) -> str:
    """A page with collapsible subtrees and a search box that filters by path, class, supplier, settings, shape and
    axes."""
    title = html.escape(title)
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<header><h1>{title}</h1><input type='search' placeholder='filter: attention axcore-rope embed ...' autofocus>"
        f"<button id='open'>unfold all</button><button id='close'>fold all</button><span id='shown'></span></header>"
        f"<main><div class='parameter'><span>module</span><span class='count'>parameters</span>"
        f"<span class='size'>size</span><span class='supplier'>from</span></div>{_node(tree, '')}</main>"
        f"<script>{_SCRIPT}</script></html>\n"
    )


def _node(node: ModuleNode, above: str) -> str:
    path = ".".join(part for part in (above, node.name) if part)
    settings = " ".join(f"{name}={value}" for name, value in node.settings.items())
    words = html.escape(f"{path} {node.kind} {node.supplier} {settings}".lower(), quote=True)
    inside = "".join(_parameter(parameter, path) for parameter in node.parameters)
    inside += "".join(_node(child, path) for child in node.children)
    name = html.escape(node.name or "model")
    return (
        f"<details open data-path='{words}'><summary><code>{name}</code>"
        f"<span class='kind'>{html.escape(node.kind)}</span><span class='settings'>{html.escape(settings)}</span>"
        f"<span class='count'>{node.count:,}</span>"
        f"<span class='size'>{size(node.bytes)}</span><span class='supplier'>{html.escape(node.supplier)}</span>"
        f"</summary>{inside}</details>"
    )


def _parameter(parameter: object, above: str) -> str:
    words = html.escape(f"{above}.{parameter}".lower(), quote=True)
    return f"<div class='parameter' data-path='{words}'><code>{html.escape(str(parameter))}</code></div>"
