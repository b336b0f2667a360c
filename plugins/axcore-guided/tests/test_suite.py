"""The conformance suite of grammar compilers."""

import json
import re

import pytest

from axcore.infer import Grammar
from axcore.testing import GrammarCompilerSuite

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 23]}}, "required": ["a"], "additionalProperties": False}


@pytest.mark.long
class TestLLGuidance(GrammarCompilerSuite):
    name = "llguidance"
    options = {"whitespace": ""}
    texts = {
        Grammar.regex("[0-9]{2}-(x|yz)?"): ("12-", "34-x", "56-yz"),
        Grammar.choice(["yes", "no", "Größe"]): ("yes", "no", "Größe"),
        Grammar.json_schema(SCHEMA): ('{"a":1}', '{"a":23}'),
        Grammar.rules('start: "a" ("b" | "c")'): ("ab", "ac"),
        Grammar.rules('root ::= "a" [b-d]'): ("ab", "ad"),
    }
    unsupported = (Grammar.regex("("), Grammar.rules("begin: A"), Grammar.json_schema({"type": "none"}))

    def matches(self, grammar, text):
        if grammar.kind == "regex":
            return re.fullmatch(grammar.text, text) is not None
        if grammar.kind == "json_schema":
            return text in ('{"a":1}', '{"a":23}')
        if grammar.kind == "choice":
            return text in json.loads(grammar.text)
        return re.fullmatch("a[bc]" if grammar.kind == "lark" else "a[bcd]", text) is not None
