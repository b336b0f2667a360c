"""Samples of axcore-new-grammar-compiler match their grammars."""

import json

from axcore.infer import Grammar
from axcore.testing import GrammarCompilerSuite

CHOICES = ("yes", "yes, please", "no", "Größe")


class TestChoices(GrammarCompilerSuite):
    name = "new-grammar-compiler"
    texts = {Grammar.choice(CHOICES): CHOICES}
    unsupported = (Grammar.regex("[0-9]+"), Grammar.json_object())

    def matches(self, grammar, text):
        return text in json.loads(grammar.text)


class TestIgnoringCase(TestChoices):
    options = {"ignore_case": True}
    texts = {Grammar.choice(["Yes", "no"]): ("Yes", "yes", "NO")}

    def matches(self, grammar, text):
        return text.lower() in ("yes", "no")
