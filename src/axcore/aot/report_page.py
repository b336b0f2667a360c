"""The report of a compiled program as a self-contained HTML page."""

from __future__ import annotations

import html

from axcore.aot.chips import GIB
from axcore.aot.report import Report

_STYLE = """
:root { color-scheme: light dark; --muted: #777; --line: #8884; --accent: #3567b8; --good: #2a8a4a; --bad: #c0392b; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 60rem; padding: 0 1rem; }
h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; border-bottom: 1px solid var(--line); }
table { border-collapse: collapse; width: 100%; }
th { text-align: left; font-weight: normal; color: var(--muted); width: 17rem; vertical-align: top; }
th, td { padding: .15rem .8rem .15rem 0; font-variant-numeric: tabular-nums; }
.verdict { font-size: 1.1rem; font-weight: 600; color: var(--good); } .verdict.bad { color: var(--bad); }
.bar { display: flex; height: 1.6rem; margin: .5rem 0; border: 1px solid var(--line); position: relative; }
.bar i { position: absolute; top: -4px; bottom: -4px; border-left: 2px solid var(--bad); }
.key { display: flex; gap: 1.2rem; flex-wrap: wrap; color: var(--muted); }
.key span::before { content: ''; display: inline-block; width: .8rem; height: .8rem; margin-right: .4rem;
  background: var(--color); }
"""
_COLORS = ("#3567b8", "#7aa6e0", "#d99a3d", "#9a9a9a")


def report_page(report: Report, *, title: str) -> str:
    """A page with the verdict, a bar of the memory of a device with its limit, and all figures of the report."""
    title = html.escape(title)
    bad = "" if report.fits else " bad"
    tables = "".join(
        f"<h2>{html.escape(name)}</h2><table>"
        + "".join(f"<tr><th>{html.escape(key)}</th><td>{html.escape(value)}</td></tr>" for key, value in rows)
        + "</table>"
        for name, rows in report.sections()
    )
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><div class='verdict{bad}'>{html.escape(report.verdict)}</div>{_bar(report)}{tables}</html>\n"
    )


def _bar(report: Report) -> str:
    """The memory of a device by use, with a mark at the limit."""
    memory = report.memory
    parts = dict(report.state_bytes)
    if memory.out_of_memory:
        parts["everything else"] = memory.total - sum(parts.values())
    else:
        parts["other arguments and outputs"] = memory.total - memory.temporaries - sum(parts.values())
        parts["temporaries"] = memory.temporaries
    shown = {name: max(count, 0) for name, count in parts.items()}
    whole = max(report.limit, memory.total) or 1
    bars = keys = ""
    for (name, count), color in zip(shown.items(), _COLORS, strict=False):
        bars += f"<div style='width:{100 * count / whole:.3f}%;background:{color}'></div>"
        keys += f"<span style='--color:{color}'>{html.escape(name)} {count / GIB:.2f} GiB</span>"
    mark = f"<i style='left:{100 * report.limit / whole:.3f}%'></i>"
    limit = f"<span style='--color:var(--bad)'>limit {report.limit / GIB:.2f} GiB</span>"
    return f"<div class='bar'>{bars}{mark}</div><div class='key'>{keys}{limit}</div>"
