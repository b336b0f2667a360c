"""The page docs/models.md runs as it stands, and lists what there is."""

import pathlib
import re

from axcore.module import abstract
from axcore.nn import CausalLM
from axcore.plugin import Feature, registry

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_code_of_the_page_runs_in_order_and_every_model_of_it_can_be_built():
    names = {}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL):
        exec(block, names)  # the page's own text
    models = {name: each for name, each in names.items() if isinstance(each, CausalLM.Config)}
    assert {"model", "gpt2", "gemma", "deepseek", "plain", "wide", "small", "dropped"} == set(models)
    for each in models.values():
        abstract(each)


def test_features_that_the_page_names_are_offered():
    offered = {name for _, offer in registry().offers(Feature) for name in [offer.name]}
    assert set(re.findall(r'use\("([\w-]+)"', PAGE)) <= offered
