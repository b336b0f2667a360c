"""Tokens per second of one row with and without n-gram drafts: `python benchmarks/speculation.py [RECIPE]`.

Requires weights (`make weights`). The runs with and without drafts alternate, so that other work on the machine affects
both. Prints a line of JSON for each prompt and number of drafts.
"""

import argparse
import json
import statistics
import time

import axcore as ax
from axcore.infer import Engine, Request, SamplingOptions
from axcore.infer.loading import load_model
from axcore.infer.speculation import NGram

CODE = """def mean(values):
    total = 0.0
    for value in values:
        total = total + value
    return total / len(values)


def variance(values):
    center = mean(values)
    total = 0.0
    for value in values:
        total = total + (value - center) * (value - center)
    return total / len(values)
"""
PROMPTS = {
    "copy": f"Repeat this Python file exactly, without changes:\n\n```python\n{CODE}```",
    "edit": f"Rename the function `mean` to `average` and write the whole file:\n\n```python\n{CODE}```",
    "story": "Write a short story about a lighthouse keeper and a lost whale.",
}
CHAT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def seconds(engine, request):
    started = time.perf_counter()
    piece = engine.generate([request])[0]
    return time.perf_counter() - started, piece.ids


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", nargs="?", default="smollm2-135m")
    parser.add_argument("--dtype", help="dtype of parameters and activations (default: the recipe's)")
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--drafts", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--temperature", type=float, default=0.0)
    given = parser.parse_args()
    model, tokenizer = load_model(ax.recipe(given.recipe), name=given.recipe, dtype=given.dtype)
    options = SamplingOptions(temperature=given.temperature, seed=0, max_tokens=given.tokens, ignore_eos=True)
    cfg = Engine.Config(max_len=1024, max_rows=1)
    for count in given.drafts:
        fast = cfg.set(speculation=NGram.Config(num_speculative_tokens=count)).build(model, tokenizer)
        with cfg.build(model, tokenizer) as slow, fast:
            for name, text in PROMPTS.items():
                request = Request(tuple(tokenizer.encode(CHAT.format(text).encode()).tolist()), options)
                expected = [seconds(each, request)[1] for each in (slow, fast)]  # compiles
                before, times = fast.stats, [[], []]
                for _ in range(given.repeats):
                    for each, found in zip((slow, fast), times, strict=True):
                        found.append(seconds(each, request)[0])
                after = fast.stats
                drafted, accepted = (
                    getattr(after, field) - getattr(before, field) for field in ("draft_tokens", "accepted_tokens")
                )
                rates = [given.tokens / statistics.median(each) for each in times]
                print(
                    json.dumps(
                        {
                            "prompt": name,
                            "num_speculative_tokens": count,
                            "tokens_per_s": [round(rate, 1) for rate in rates],
                            "speedup": round(rates[1] / rates[0], 2),
                            "acceptance": round(accepted / max(drafted, 1), 3),
                            "tokens_per_step": round(given.repeats * given.tokens / (after.steps - before.steps), 2),
                            "equal": expected[0] == expected[1],
                        }
                    ),
                    flush=True,
                )


if __name__ == "__main__":
    main()
