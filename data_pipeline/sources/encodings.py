"""Text files in an encoding other than UTF-8: turned into UTF-8 while they are read."""

from __future__ import annotations

import codecs
import io
from contextlib import suppress
from typing import BinaryIO

from data_pipeline.sources import INVALID, UTF8, BadRecord, Problem
from samestep.errors import ConfigError

_BUFFER = 2**16
# Python counts these as encodings of text; they are notations within it.
_NOTATIONS = ("idna", "punycode", "raw-unicode-escape", "unicode-escape")


def normalized(name: str) -> str:
    """Returns the name of an encoding as Python spells it: "utf-8" for "UTF8", a BOM or not.

    Raises:
        ConfigError: Python has no such encoding of text.
    """
    try:
        "".encode(name)  # rejects codecs of bytes, such as zlib
        found = codecs.lookup(name).name
        if found.replace("_", "-") in _NOTATIONS:
            raise LookupError(found)
    except (LookupError, UnicodeError, ValueError):
        raise ConfigError(
            f"encoding is {name!r}, which Python does not know. Use a name such as utf-8, cp1252, "
            "latin-1 or utf-16."
        ) from None
    return UTF8 if found == "utf-8-sig" else found


def recoded(file: BinaryIO, encoding: str) -> BinaryIO:
    """Returns the file's text in UTF-8.

    Bytes that mean nothing in the encoding spoil their record, and in encodings of several bytes
    a character, as utf-16, the rest of the file: reading it raises BadRecord there.
    """
    if encoding == UTF8:
        return file
    return io.BufferedReader(_Recoded(file, encoding), _BUFFER)


def named(data: bytes, encoding: str) -> bytes:
    """Returns a record's bytes, or a Problem that names the encoding if they are not valid."""
    if encoding == UTF8:  # the workers decode it
        return data
    if not isinstance(data, Problem):
        with suppress(UnicodeDecodeError):
            data.decode()
            return data
    elif data.decode() != INVALID:  # of a row of CSV, which is decoded already
        return data
    return Problem.of(f"invalid {encoding}")


class _Recoded(io.RawIOBase):
    def __init__(self, file: BinaryIO, encoding: str) -> None:
        self._file, self._encoding = file, encoding
        # A byte that means nothing becomes half of a surrogate pair, which is no valid UTF-8.
        self._decoder = codecs.getincrementaldecoder(encoding)("surrogateescape")
        self._left = b""
        self._is_damaged = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._left:
            if self._is_damaged:
                raise BadRecord(f"invalid {self._encoding}")
            # Not `read`, which loses what precedes damage of a compressed file.
            data = self._file.read1(_BUFFER)  # type: ignore[attr-defined]
            self._left = self._recode(data)
            if not data and not self._is_damaged:
                break
        content, self._left = self._left[: len(buffer)], self._left[len(buffer) :]
        buffer[: len(content)] = content
        return len(content)

    def _recode(self, data: bytes) -> bytes:
        try:
            text = self._decoder.decode(data, final=not data)
        except UnicodeError as error:
            self._is_damaged, text = True, ""
            if isinstance(error, UnicodeDecodeError):  # the records before it are good
                text = error.object[: error.start].decode(error.encoding, "ignore")
        return text.encode("utf-8", "surrogatepass")
