"""Writes embeddings and beam searches of `transformers` for some recorded checkpoints. Requires `transformers`.

python tests/parity/record_inference.py
"""

import json
from pathlib import Path

import numpy as np
import torch
import transformers

HERE = Path(__file__).parent / "recorded"
FAMILIES = "gemma2", "gpt2", "llama"
SEARCHES = (
    {"num_beams": 1, "max_new_tokens": 8},
    {"num_beams": 4, "max_new_tokens": 8},
    {"num_beams": 3, "max_new_tokens": 8, "length_penalty": 0.0, "early_stopping": True},
    {"num_beams": 4, "max_new_tokens": 8, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 4, "max_new_tokens": 8, "length_penalty": -1.0},
)
ENDS = list(range(2, 64, 3))
"""Many tokens end an output, since the next token of a random model could be any."""


def cut(ids):
    """The tokens of an output up to its end token, without padding."""
    return ids[: next((at + 1 for at, token in enumerate(ids) if token in ENDS), len(ids))]


def search(model, prompt, options):
    """The beams of one prompt, the best first."""
    found = model.generate(
        torch.tensor([prompt]),
        do_sample=False,
        num_return_sequences=options["num_beams"],
        eos_token_id=ENDS,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    scores = [None] if found.get("sequences_scores") is None else found.sequences_scores.tolist()
    outputs = [cut(row[len(prompt) :]) for row in found.sequences.tolist()]
    return [{"ids": ids, "score": score} for ids, score in zip(outputs, scores, strict=True)]


for family in FAMILIES:
    model = transformers.AutoModelForCausalLM.from_pretrained(
        HERE / family, dtype=torch.float32, attn_implementation="eager"
    )
    random, found = np.random.default_rng(0), []
    for length in (3, 8, 17):
        prompt = random.integers(3, model.config.vocab_size, length).tolist()
        with torch.no_grad():
            hidden = model.eval()(torch.tensor([prompt]), output_hidden_states=True).hidden_states[-1][0].double()
        searches = [{"options": options, "beams": search(model, prompt, options)} for options in SEARCHES]
        entry = {"prompt": prompt, "last": hidden[-1].tolist(), "mean": hidden.mean(0).tolist(), "searches": searches}
        found.append(entry)
    (HERE / family / "inference.json").write_text(json.dumps({"ends": ENDS, "prompts": found}) + "\n")
