"""mypy on the code of a sample plugin."""

import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

pytest.importorskip("mypy")

HERE = pathlib.Path(__file__).parent


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """{file name: {line: error codes}}"""
    root = HERE.parents[1]
    cache = root / ".mypy_cache"
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), "--no-pretty"]
    command += [
        "--cache-dir",
        str(cache),
        "--no-error-summary",
        str(HERE / "sample_good.py"),
        str(HERE / "sample_bad.py"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    errors = {}
    for file, line, message in re.findall(r"^(.+?):(\d+): error: (.*)$", done.stdout, re.MULTILINE):
        code = re.search(r"\[([\w-]+)\]$", message)
        errors.setdefault(pathlib.Path(file).name, {}).setdefault(int(line), {})[code[1] if code else ""] = message
    return errors


def test_a_correct_plugin_has_no_type_errors(found):
    assert found.get("sample_good.py", {}) == {}


def test_each_mistake_is_reported_on_its_line(found):
    lines = (HERE / "sample_bad.py").read_text().splitlines()
    expected = {
        number: match[1].split()
        for number, line in enumerate(lines, 1)
        if (match := re.search(r"# expect: (.+)$", line))
    }
    errors = found["sample_bad.py"]
    assert len(expected) > 12 and errors.keys() == expected.keys(), errors
    for number, codes in expected.items():
        kinds = set(errors[number]) - {"misc"}  # older versions of mypy add `misc`
        assert kinds == set(codes) - {"misc"}, (number, errors[number])
