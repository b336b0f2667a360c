"""The code of docs/models.md runs, and its lists are complete."""

import pathlib
import re

from axcore.module import abstract
from axcore.nn import CausalLM
from axcore.plugin import Feature, registry

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_and_builds_every_model():
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)  # the text of the page
    models = {name: each for name, each in names.items() if isinstance(each, CausalLM.Config)}
    assert {"model", "gpt2", "gemma", "deepseek", "plain", "wide", "small", "mixed", "dropped"} == set(models)
    for each in models.values():
        abstract(each)


def test_features_on_the_page_are_offered():
    offered = {name for _, offer in registry().offers(Feature) for name in [offer.name]}
    assert set(re.findall(r'use\("([\w-]+)"', PAGE)) <= offered
