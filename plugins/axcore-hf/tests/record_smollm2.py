"""Writes smollm2.json: tokens and continuations of SmolLM2-135M by `transformers`. Requires `transformers`.

python tests/record_smollm2.py FILE.gguf
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from tokenizers import pre_tokenizers

TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time there was a",
    "def fibonacci(n):\n",
    "Water boils at a temperature of",
    "The largest planet of the solar system is",
    "1, 2, 3, 4,",
    "To make bread you need flour,",
    "Shakespeare wrote",
    "import numpy as np\n\nx =",
    "The opposite of hot is",
    "Dear Sir or Madam,\n\nI am writing to",
    "In 1969, the first man",
    "Photosynthesis is the process by which",
    "<|im_start|>user\nWhat is the capital of Italy?<|im_end|>\n<|im_start|>assistant\n",
    "Q: How many legs does a spider have?\nA:",
    "The three primary colours are",
    "for i in range(10):\n    ",
    "Gravity is a force that",
    "Paris, London, Berlin,",
    "My favourite animal is the",
]
TEXTS = [
    "",
    " ",
    "Hello  world\n\n\tindented",
    "naïve café, 東京 🎌 — ½ ǅ",
    "x=1;y=[2,3];print(f'{x:>10}')",
    "1234567890 3.14159 0xFF",
    "don't we'll I'VE she's",
    "<|im_start|>user\nhi<|im_end|>",
    "trailing space ",
    "a" * 50,
    "\u200bzero\u200dwidth",
    "\r\nwindows\r\n",
]


def main(file: Path) -> None:
    folder, name = file.parent, file.name
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    # The published tokenizer splits off each digit. The conversion from GGUF drops this step.
    apart = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(apart)
    greedy = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).input_ids
        out = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0]
        greedy.append({"prompt": prompt, "ids": ids[0].tolist(), "continuation": out[ids.shape[1] :].tolist()})
        print(repr(prompt), "->", repr(tokenizer.decode(out[ids.shape[1] :])), flush=True)
    texts = [{"text": text, "ids": tokenizer(text, add_special_tokens=False).input_ids} for text in TEXTS]
    recorded = {"transformers": transformers.__version__, "tokens": TOKENS, "greedy": greedy, "texts": texts}
    (Path(__file__).parent / "smollm2.json").write_text(json.dumps(recorded, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
