"""What the command line prints about an error."""

import axcore.cli
from axcore import AxcoreError


def test_the_notes_of_an_error_are_printed(monkeypatch, capsys):
    def fail():
        error = AxcoreError("runs/no-such is not a model folder")
        error.add_note("while loading the adapter 'sql'")
        raise error

    monkeypatch.setattr(axcore.cli, "_parser", fail)
    assert axcore.cli.main(["recipes"]) == 2
    assert capsys.readouterr().err == "axcore: runs/no-such is not a model folder\n  while loading the adapter 'sql'\n"
