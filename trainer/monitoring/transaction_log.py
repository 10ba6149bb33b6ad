"""Reads the steps in the file of an offline W&B run.

W&B's own process writes the file. When a write fails, as on a full disk, it writes nothing more and
reports nothing to the run.

The file has a header of 7 bytes, then a LevelDB log: blocks of 32 KiB with records of a checksum
(CRC-32), a length, a type (whole, or first, middle, last part) and data, a protocol buffer.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

from samestep.errors import MissingExtra
from samestep.untrusted import open_regular, read_regular

_FORMAT = b":W&B\xe1\xbe\x00"
_BLOCK_BYTES = 32768
_HEADER = struct.Struct("<IHB")
_WHOLE, _LAST = 1, 4


class UnknownFormatError(Exception):
    """A file has a format that this module does not read."""


def records(path: Path) -> Iterator[bytes]:
    """Yields the records of a file, up to the first one that is damaged or incomplete."""
    data = read_regular(path)
    position, record = len(_FORMAT), b""
    while position + _HEADER.size <= len(data):
        left = _BLOCK_BYTES - position % _BLOCK_BYTES
        if left < _HEADER.size:  # the rest of a block has no room for a header
            position += left
            continue
        checksum, length, kind = _HEADER.unpack_from(data, position)
        part = data[position + _HEADER.size : position + _HEADER.size + length]
        if len(part) < length or zlib.crc32(part, zlib.crc32(bytes([kind]))) != checksum:
            return
        position += _HEADER.size + length
        record += part
        if kind in (_WHOLE, _LAST):
            yield record
            record = b""


def steps(path: Path) -> set[int]:
    """Returns the steps of the history in a file.

    Raises:
        UnknownFormatError: another version of W&B has written it.
        MissingExtra: the package wandb is not installed.
    """
    with open_regular(path) as file:
        if not _FORMAT.startswith(file.read(len(_FORMAT))):  # nothing is written yet if it is empty
            raise UnknownFormatError(f"{path} has an unknown format")
    try:  # mypy knows no types of W&B, where that is installed
        parse = import_module("wandb.proto.wandb_internal_pb2").Record.FromString
    except ImportError as error:
        raise MissingExtra("wandb", "wandb", "tracking.wandb") from error
    found = map(parse, records(path))
    return {each.history.step.num for each in found if each.WhichOneof("record_type") == "history"}
