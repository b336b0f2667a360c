"""The input pipeline: text files to token batches that shuffle, shard and resume exactly."""

from axcore.train.data.base import Input, ResumableBatches
from axcore.train.data.batch import Batch, batch_spec
from axcore.train.data.iterator import TrainBatches
from axcore.train.data.sources import Corpus, Document, TextFiles, TextSource
from axcore.train.data.text import TextInput
from axcore.train.data.tokenizers import ByteTokenizer, Tokenizer

__all__ = [
    "Batch",
    "ByteTokenizer",
    "Corpus",
    "Document",
    "Input",
    "ResumableBatches",
    "TextFiles",
    "TextInput",
    "TextSource",
    "Tokenizer",
    "TrainBatches",
    "batch_spec",
]


def __dir__() -> list[str]:
    return __all__
