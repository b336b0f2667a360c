"""Copies the files that `axcore new-plugin` writes into the pages of docs/plugins, to keep them in sync.

    .venv/bin/python tools/plugin_pages.py

A page names its plugin in the line `$ axcore new-plugin NAME --kind KIND`. The script rewrites the code blocks of the
page whose titles are files of the plugin.
"""

import pathlib
import re
import tempfile

from axcore.cli.new_plugin import new_plugin

DOCS = pathlib.Path(__file__).parent.parent / "docs" / "plugins"
COMMAND = re.compile(r"^\$ axcore new-plugin (\S+) --kind (\S+)$", re.MULTILINE)
BLOCK = re.compile(r'^(```\w+ title="([^"]+)"\n)(.*?)^```$', re.MULTILINE | re.DOTALL)


def rewritten(page: str) -> str:
    """The page with the current files."""
    command = COMMAND.search(page)
    if command is None:
        return page
    with tempfile.TemporaryDirectory() as scratch:
        folder = new_plugin(command[1], command[2], pathlib.Path(scratch))

        def block(found: re.Match[str]) -> str:
            file = folder.parent / found[2]
            return f"{found[1]}{file.read_text() if file.exists() else found[3]}```"

        return BLOCK.sub(block, page)


if __name__ == "__main__":
    for path in sorted(DOCS.glob("*.md")):
        path.write_text(rewritten(path.read_text()))
