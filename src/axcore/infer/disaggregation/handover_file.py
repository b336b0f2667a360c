"""Handovers as bytes, for files and sockets."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO

import jax.numpy as jnp
import numpy as np

from axcore.config import AxcoreError
from axcore.infer.disaggregation.handover import Handover
from axcore.infer.execution.row_state import RowState
from axcore.infer.requests import TokenLogprob

VERSION = 3
"""The version of the format of `write_handover`. Engines exchange handovers of the same version only."""

_MAGIC = b"axcore-handover\n"
_LARGEST_HEADER = 1 << 28


def write_handover(handover: Handover, file: BinaryIO) -> None:
    """Writes a handover to a file or to the file of a socket: a header of JSON, then the bytes of the arrays.

    The arrays are read from the device first. Numbers are little-endian.
    """
    state = handover.state.on_host()
    arrays = list(_arrays(state))
    header = {
        "model": handover.model,
        "adapter": handover.adapter,
        "ids": handover.ids,
        "num_cached": handover.num_cached,
        "num_tokens": state.num_tokens,
        "page_size": state.page_size,
        "logprob": _packed(handover.logprob),
        "prompt_logprobs": None if handover.prompt_logprobs is None else [*map(_packed, handover.prompt_logprobs)],
        "arrays": [
            {
                "part": part,
                "path": path,
                "dtype": array.dtype.name,
                "shape": array.shape,
                "crc32": zlib.crc32(_bytes(array)),
            }
            for part, path, array in arrays
        ],
    }
    text = json.dumps(header).encode()
    file.write(_MAGIC + struct.pack("<IQ", VERSION, len(text)) + text)
    for _, _, array in arrays:
        file.write(_bytes(array))
    file.flush()


def read_handover(file: BinaryIO) -> Handover:
    """Reads what `write_handover` has written.

    Raises:
        AxcoreError: the file ends early, has another format or version, or was changed.
    """
    start = _exactly(file, len(_MAGIC) + 12, "its first bytes")
    version, size = struct.unpack("<IQ", start[len(_MAGIC) :])
    if start[: len(_MAGIC)] != _MAGIC:
        raise AxcoreError(f"handover: it starts with {start[: len(_MAGIC)]!r}. Use a file of write_handover")
    if version != VERSION:
        raise AxcoreError(f"handover: it has version {version}, but this is {VERSION}. Use the same release of axcore")
    if size > _LARGEST_HEADER:
        raise AxcoreError(f"handover: its header has {size} bytes, at most {_LARGEST_HEADER} are allowed")
    parts: dict[str, dict[str, np.ndarray]] = {"pages": {}, "slot": {}}
    try:
        header = json.loads(_exactly(file, size, "its header"))
        for each in header["arrays"]:
            dtype, shape = jnp.dtype(each["dtype"]), tuple(map(int, each["shape"]))
            if min(shape, default=0) < 0:
                raise ValueError(f"a shape is {shape}")
            data = _exactly(file, dtype.itemsize * int(np.prod(shape, dtype=np.int64)), each["path"])
            if zlib.crc32(data) != each["crc32"]:
                raise AxcoreError(f"handover: the bytes of {each['path']} were changed. Send it again")
            parts[each["part"]][each["path"]] = np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
        scores = header["prompt_logprobs"]
        return Handover(
            str(header["model"]),
            None if header["adapter"] is None else str(header["adapter"]),
            tuple(map(int, header["ids"])),
            RowState(
                int(header["num_tokens"]),
                int(header["page_size"]),
                (parts["pages"],) if parts["pages"] else (),
                parts["slot"],
            ),
            _unpacked(header["logprob"]),
            None if scores is None else tuple(each for score in scores if (each := _unpacked(score)) is not None),
            int(header["num_cached"]),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise AxcoreError(f"handover: its header is not valid: {error}. Send it again") from error


def _arrays(state: RowState) -> Iterator[tuple[str, str, np.ndarray]]:
    for part, blocks in (*(("pages", group) for group in state.pages), ("slot", state.slot)):
        for path, block in blocks.items():
            yield part, path, np.asarray(block)


def _bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _exactly(file: BinaryIO, size: int, what: str) -> bytes:
    data = file.read(size)
    if len(data) != size:
        raise AxcoreError(f"handover: it ends in {what}, after {len(data)} of {size} bytes. Send it again")
    return data


def _packed(found: TokenLogprob | None) -> list[object] | None:
    return None if found is None else [found.id, found.logprob, found.rank, found.top]


def _unpacked(found: list[Any] | None) -> TokenLogprob | None:
    if found is None:
        return None
    id, logprob, rank, top = found
    return TokenLogprob(int(id), float(logprob), int(rank), tuple((int(at), float(value)) for at, value in top))
