"""The input pipeline: text files to token batches that shuffle, shard and resume exactly."""

from axcore.train.input.base import Input, ResumableBatches
from axcore.train.input.batch import Batch, batch_spec
from axcore.train.input.iterator import TrainBatches
from axcore.train.input.source import Corpus, Document, TextFiles, TextSource
from axcore.train.input.text import TextInput
from axcore.train.input.tokenizer import ByteTokenizer, Tokenizer

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
