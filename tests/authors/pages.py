"""Follows a page of docs/plugins as a reader does: writes its files and runs its commands, in order."""

import dataclasses
import os
import pathlib
import re
import shlex
import subprocess
import sys
import sysconfig
import venv

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "plugins"
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
AXCORE = "import sys; from axcore.cli import main; sys.exit(main())"


@dataclasses.dataclass(frozen=True)
class File:
    path: str
    content: str


@dataclasses.dataclass(frozen=True)
class Command:
    """A line after `$ `, and the lines that the page shows below it."""

    line: str
    shown: tuple[str, ...]


def steps(page):
    """The files (blocks with a title) and commands (blocks of `console`) of a page."""
    found = []
    for language, title, body in BLOCK.findall(page.read_text(encoding="utf-8")):
        if title:
            found.append(File(title, body))
        elif language == "console":
            for each in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
                line, *shown = each.splitlines()
                found.append(Command(line, tuple(line for line in shown if line.strip() not in ("", "..."))))
    return found


class Machine:
    """A folder outside the repository, and a virtual environment that sees the test environment through a .pth file."""

    def __init__(self, folder, pip, checks=""):
        """`checks`: options for every pytest run of the page."""
        self.folder, self.pip, self.checks = folder, pip, checks
        self.python = folder.parent / f"{folder.name}-env" / "bin" / "python"
        venv.create(self.python.parents[1], symlinks=True)
        own = next(self.python.parents[1].glob("lib/python*/site-packages"))
        link = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (own / "tests.pth").write_text(link)  # unlike a plain path, addsitedir also reads the .pth files there

    def follow(self, page):
        for step in steps(page):
            if isinstance(step, File):
                self.write(step)
            else:
                output = " ".join(self.run(step.line).split())
                for line in step.shown:
                    assert " ".join(line.split()) in output, f"$ {step.line}\n{line}\nis not in\n{output}"

    def write(self, file):
        """Writes a file of the page. A file that `axcore new-plugin` has written must already have this content."""
        path = self.folder / file.path
        if path.exists():
            assert path.read_text() == file.content, f"{file.path} differs from the page; run tools/plugin_pages.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content)

    def run(self, line):
        """The output of a command of the page. `pip install` builds a wheel and installs it without network access."""
        program, *arguments = shlex.split(line)
        if program == "pip":
            (path,) = [each for each in arguments if each.startswith(".")]
            return self.install(self.folder / path.partition("[")[0])
        commands = {"axcore": ["-c", AXCORE], "pytest": ["-m", "pytest", "-p", "no:cacheprovider"], "python": []}
        return self._python(self.python, *commands[program], *arguments)

    def install(self, source):
        wheels = self.folder.parent / f"{self.folder.name}-wheels"
        self._python(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(wheels), cwd=source)
        (wheel,) = wheels.glob("*.whl")
        options = "--no-deps", "--no-index", "--quiet", "--no-compile"
        return self._python(self.pip, "-m", "pip", "--python", str(self.python), "install", *options, str(wheel))

    def _python(self, python, *arguments, cwd=None):
        env = {**os.environ, "PYTEST_ADDOPTS": self.checks}
        done = subprocess.run(
            [str(python), *arguments], cwd=cwd or self.folder, env=env, text=True, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{shlex.join(arguments)}\n{done.stdout}\n{done.stderr}"
        return done.stdout
