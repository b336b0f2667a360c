"""A page of docs/plugins, read as a reader reads it: files to write and commands to run, in order."""

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
    """A folder outside the repository, and an environment whose one link to that of the tests is a .pth file."""

    def __init__(self, folder, pip, checks=""):
        """`checks`: options for every pytest that a page runs."""
        self.folder, self.pip, self.checks = folder, pip, checks
        self.python = folder.parent / f"{folder.name}-env" / "bin" / "python"
        venv.create(self.python.parents[1], symlinks=True)
        own = next(self.python.parents[1].glob("lib/python*/site-packages"))
        link = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
        (own / "tests.pth").write_text(link)  # a line of code, so that the .pth files over there count as well

    def follow(self, page):
        for step in steps(page):
            if isinstance(step, File):
                self.write(step)
            else:
                output = " ".join(self.run(step.line).split())
                for line in step.shown:
                    assert " ".join(line.split()) in output, f"$ {step.line}\n{line}\nis not in\n{output}"

    def write(self, file):
        """What `axcore new-plugin` has written must be as the page shows it; other files are new."""
        path = self.folder / file.path
        if path.exists():
            assert path.read_text() == file.content, f"{file.path} differs; tools/plugin_pages.py rewrites the pages"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(file.content)

    def run(self, line):
        """What a command of a page prints. `pip install` builds the wheel and installs that, without a network."""
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
