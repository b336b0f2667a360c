"""The byte tokenizer as a `tokenizer.json`."""

from __future__ import annotations

import json

from axcore.train.data import ByteTokenizer

SEPARATOR = "<|endoftext|>"


def byte_level_files() -> dict[str, bytes]:
    """The files of a tokenizer with the ids and the prompts of `ByteTokenizer`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    end = ByteTokenizer.separator_id
    tokenizer = Tokenizer(models.BPE({character: number for number, character in enumerate(characters())}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(SEPARATOR, special=True, normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SEPARATOR} $A", special_tokens=[(SEPARATOR, end)]
    )
    described = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": SEPARATOR,
        "eos_token": SEPARATOR,
        "clean_up_tokenization_spaces": False,
    }
    return {
        "tokenizer.json": tokenizer.to_str().encode(),
        "tokenizer_config.json": (json.dumps(described, indent=2) + "\n").encode(),
    }


def characters() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies, as in GPT-2's `bytes_to_unicode`."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    rest = iter(range(256, 512))
    return [chr(byte if byte in printable else next(rest)) for byte in range(256)]
