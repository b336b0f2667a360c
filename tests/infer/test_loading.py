"""Sources of models for inference."""

import pytest

import axcore as ax
from axcore.infer import Engine
from axcore.infer.loading import load_engine


def test_the_name_of_a_recipe_is_refused_with_what_to_pass():
    message = r"'quickstart' is a recipe, not a folder\. Pass its config: axcore\.recipe\('quickstart'\)"
    with pytest.raises(ax.AxcoreError, match=message):
        load_engine("quickstart", Engine.Config(max_len=16))
