"""The input pipeline, from documents to token batches: shuffled, mixed, sharded and resumable, in constant memory."""

from axcore.train.data.base import Input, ResumableBatches, check_identity
from axcore.train.data.batch import Batch, Row, batch_spec
from axcore.train.data.iterator import TrainBatches
from axcore.train.data.json_lines import JsonLines
from axcore.train.data.mixture import Mixture
from axcore.train.data.packing import ConcatThenSplit, FirstFit, Packing, Tokens
from axcore.train.data.source import Document, Source, Split
from axcore.train.data.text import TextInput
from axcore.train.data.text_files import TextFiles
from axcore.train.data.tokenizers import ByteTokenizer, Tokenizer
from axcore.train.files import Json

__all__ = [
    "Batch",
    "ByteTokenizer",
    "ConcatThenSplit",
    "Document",
    "FirstFit",
    "Input",
    "Json",
    "JsonLines",
    "Mixture",
    "Packing",
    "ResumableBatches",
    "Row",
    "Source",
    "Split",
    "TextFiles",
    "TextInput",
    "Tokenizer",
    "Tokens",
    "TrainBatches",
    "batch_spec",
    "check_identity",
]


def __dir__() -> list[str]:
    return __all__
