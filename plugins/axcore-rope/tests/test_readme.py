"""The README's code runs unchanged, and its models can be built."""

import pathlib
import re

from axcore.module import abstract
from axcore.nn import layers_of
from axcore.plugin import Feature, registry

README = (pathlib.Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_readme_code_runs():
    names = {"__name__": "readme"}
    for block in re.findall(r"^```python\n(.*?)^```$", README, re.MULTILINE | re.DOTALL):
        exec(block, names)  # text of this repository
    assert names["long"] == names["same"]
    for name in ("rope", "long", "nope", "gemma", "mine"):
        abstract(names[name].model)
    positions = [place.config.attention.position for place in layers_of(names["nope"].model.decoder)]
    assert [each is None for each in positions[:8]] == [False, False, False, True] * 2


def test_readme_lists_every_feature():
    offered = {offer.name for plugin, offer in registry().offers(Feature) if plugin.id == "rope"}
    assert set(re.findall(r"^\| `([\w-]+)` \| `(?:position|bias)`", README, re.MULTILINE)) == offered
