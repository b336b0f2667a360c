"""Tests of axcore-new-command."""

import pytest

import axcore as ax
from axcore_new_command.count import main


def test_it_prints_the_number_of_parameters(capsys):
    assert main(["quickstart"]) == 0
    assert capsys.readouterr().out == "527,744\n"


def test_an_unknown_recipe_is_an_error():
    with pytest.raises(ax.AxcoreError, match="there is no recipe 'quickstrt'"):
        main(["quickstrt"])
