"""A folder of embeddings.

vectors.json          what they are of: width D, number N, type, the model and its pooling
00000.npy ...         [n, D] each, n = `part` but for the last; float32, float16 or int8
00000.scales.npy ...  with int8: float32 [n], by which the rows are multiplied
names.jsonl           N lines, the id of each text: "_id" of a row, or else the number of its line

Of sparse vectors, the numbers that are not 0 are stored, row by row, as in a matrix of SciPy,
csr_matrix((values, columns, offsets), (n, D)):

00000.npy ...          [K], the values
00000.columns.npy ...  int32 [K], of each value
00000.offsets.npy ...  int64 [n + 1]: row i has the values from offsets[i] to offsets[i + 1]
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, NotRequired, TypeAlias, TypedDict

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from samestep.errors import ConfigError, DataError
from samestep.storage import atomic_write, make_folder, write_text
from samestep.stored_json import Between, Count, JsonError, parse_json, read_json
from samestep.untrusted import read_regular, regular
from trainer.training.retrieval.search import block_of

_Read: TypeAlias = Callable[[int, int], npt.NDArray[np.float32]]
"""From the first row to the end to vectors, fp32 [end - first, D]."""

Number: TypeAlias = Literal["float32", "float16", "int8"]

_DESCRIPTION, _NAMES = "vectors.json", "names.jsonl"
_MOST_INT8 = 127
MOST_PART = 2**31
_ROWS = 16384  # read at a time


class _Description(TypedDict):
    texts: Count
    part: Annotated[int, Between(1, MOST_PART)]
    width: Count
    number: Number
    similarity: Literal["cosine", "dot"]
    sparse: NotRequired[bool]
    made_of: dict[str, object]


@dataclass(frozen=True)
class Vectors:
    """Embeddings in a folder, read part by part.

    Attributes:
        texts: their number, N.
        part: texts of a file; the last may have fewer.
        width: D.
        number: type of the stored numbers.
        similarity: cosine or dot: what compares two of them.
        made_of: the model, its pooling and the file of the texts.
        sparse: whether only numbers other than 0 are stored.
    """

    folder: Path
    texts: int
    part: int
    width: int
    number: Number
    similarity: Literal["cosine", "dot"]
    made_of: Mapping[str, object]
    sparse: bool = False

    @classmethod
    def begin(
        cls,
        folder: Path,
        names: Sequence[str],
        *,
        part: int,
        width: int,
        number: Number,
        similarity: Literal["cosine", "dot"],
        made_of: Mapping[str, object],
        sparse: bool = False,
    ) -> Vectors:
        """Begins a folder, or goes on with one that was begun with the same.

        Several processes may do so at once: they write the same files.

        Raises:
            ConfigError: it was begun with something else, or holds other files.
        """
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file. Name a new folder with --output.")
        make_folder(folder)
        # Listed first: the description is the first file that another process writes.
        files = [file.name for file in folder.iterdir() if not file.name.startswith(".")]
        description = folder / _DESCRIPTION
        if not description.is_file():
            if files:
                raise ConfigError(
                    f"{folder} holds {files[0]}, which is no part of embeddings. Name a new folder "
                    "with --output."
                )
            settings = {
                "texts": len(names),
                "part": part,
                "width": width,
                "number": number,
                "similarity": similarity,
                **({"sparse": True} if sparse else {}),
                "made_of": made_of,
            }
            write_text(description, json.dumps(settings, indent=1) + "\n")
        found = cls._described(folder)
        # The stored settings went through JSON, which turns tuples into lists.
        before = {**found.made_of, "dtype": found.number, "texts-per-file": found.part}
        wanted = {**json.loads(json.dumps(made_of)), "dtype": number, "texts-per-file": part}
        if changed := [name for name, value in wanted.items() if before.get(name) != value]:
            raise ConfigError(
                f"{folder} was begun with different {' and '.join(changed)}. Use the same again, "
                "remove it, or choose another --output."
            )
        if not (folder / _NAMES).is_file():
            write_text(folder / _NAMES, "".join(f"{json.dumps(name)}\n" for name in names))
        return found

    @classmethod
    def open(cls, folder: Path) -> Vectors:
        """Opens a complete folder.

        Raises:
            DataError: it is none, it is not complete, or damaged.
        """
        found = cls._described(folder)
        for part in range(found.parts):
            # Several processes write parts, so a gap may lie anywhere, not only at the end.
            if not found.has(part):
                raise DataError(
                    f"{folder} is not complete: part {part + 1} of {found.parts} is missing. Run "
                    "the same samestep embed again; it goes on where it was stopped."
                )
        return found

    @classmethod
    def _described(cls, folder: Path) -> Vectors:
        try:
            found = read_json(folder / _DESCRIPTION, _Description)
        except (OSError, JsonError) as error:
            raise DataError(
                f"{folder} holds no embeddings that can be read: {error}. Name a folder that "
                "samestep embed has written."
            ) from error
        # Not `**found`: a later version, or a stranger, may have written further keys.
        return cls(
            folder,
            found["texts"],
            found["part"],
            found["width"],
            found["number"],
            found["similarity"],
            found["made_of"],
            found.get("sparse", False),
        )

    @property
    def parts(self) -> int:
        """Number of parts."""
        # Rounded up: 5 texts by 2 are 3 parts, the last with one text.
        return -(-self.texts // self.part)

    @cached_property
    def names(self) -> list[str]:
        """The id of each text.

        Raises:
            DataError: they are damaged.
        """
        file = self.folder / _NAMES
        try:
            names = [parse_json(line, str) for line in read_regular(file).splitlines()]
        except (OSError, JsonError) as error:
            raise DataError(f"cannot read {file}: {error}. Copy the folder again.") from error
        if len(names) != self.texts:
            raise DataError(
                f"{file} has {len(names)} ids of {self.texts} texts. Copy the folder again."
            )
        return names

    def has(self, part: int) -> bool:
        """Whether a part is written."""
        return self._file(part).is_file()

    def write(self, part: int, vectors: Tensor) -> None:
        """Writes a part, fp32 [n, D], as a COO tensor if `sparse`; it appears once complete.

        Raises:
            DataError: the type of the stored numbers does not hold a vector.
        """
        rows = None
        if self.sparse:
            vectors = vectors.coalesce()  # row by row
            rows, columns = vectors.indices().numpy()
            # Rows 0 0 2 of three texts have the counts 2 0 1 and the offsets 0 2 2 3.
            counts = np.bincount(rows, minlength=len(vectors))
            # The values come last: a part counts as written once their file exists.
            self._save(self._file(part, ".columns"), columns.astype(np.int32))
            self._save(self._file(part, ".offsets"), np.concatenate(([0], counts.cumsum())))
            vectors = vectors.values()
        values = vectors.numpy()
        most = np.finfo(np.float16 if self.number == "float16" else np.float32).max
        if not (np.abs(values) <= most).all():  # also NaN
            raise DataError(
                f"a vector of part {part + 1} has NaN, infinity or a number too large for "
                f"{self.number}. Use --dtype float32; if that fails too, the weights are damaged."
            )
        for left in self.folder.glob(f".{part:05}.*.tmp"):  # by a process that was killed
            left.unlink(missing_ok=True)
        if self.number == "int8":
            # The largest number of a row becomes 127 or -127: of 0.5 and -1, 64 and -127.
            if rows is None:
                scales = np.abs(values).max(1) / _MOST_INT8
            else:
                scales = np.zeros(len(counts), np.float32)
                np.maximum.at(scales, rows, np.abs(values) / _MOST_INT8)
            scales[scales == 0] = 1  # a row of zeros would be divided by 0
            # The scales come first: a part counts as written once its own file exists.
            self._save(self._file(part, ".scales"), scales.astype(np.float32))
            values = np.rint(np.divide(values, scales[:, None] if rows is None else scales[rows]))
        self._save(self._file(part), values.astype(self.number))

    def blocks(self) -> Iterator[tuple[int, Tensor]]:
        """Yields the number of the first row and vectors, fp32 [n, D], some thousand at a time.

        Raises:
            DataError: a part is damaged.
        """
        for part in range(self.parts):
            first = part * self.part
            count = min(self.part, self.texts - first)
            if self.sparse:
                rows, read = block_of(self.width), self._densified(part, count)
            else:
                rows, read = _ROWS, self._dense(part, count)
            scales = None
            if self.number == "int8":
                scales = self._load(self._file(part, ".scales"), (count,), "float32")[:, None]
            for start in range(0, count, rows):
                vectors = read(start, min(start + rows, count))
                if scales is not None:
                    vectors *= scales[start : start + rows].astype(np.float32)
                yield first + start, torch.from_numpy(vectors)

    def _dense(self, part: int, count: int) -> _Read:
        values = self._load(self._file(part), (count, self.width), self.number)
        return lambda start, end: values[start:end].astype(np.float32)

    def _densified(self, part: int, count: int) -> _Read:
        """Reads rows of a sparse part of `count` vectors."""
        offsets = self._load(self._file(part, ".offsets"), (count + 1,), "int64")
        columns = self._load(self._file(part, ".columns"), (int(offsets[-1]),), "int32")
        values = self._load(self._file(part), (int(offsets[-1]),), self.number)
        counts = np.diff(offsets)
        # Another file, or a damaged one, would make numpy read beyond the values.
        if offsets[0] != 0 or (counts < 0).any():
            raise _damaged(self._file(part, ".offsets"), "offsets that do not ascend from 0")

        def read(start: int, end: int) -> npt.NDArray[np.float32]:
            # Rows 1 to 2 of the offsets 0 2 2 3 have the values 2 to 2: row 1 has none, row 2 one.
            own = slice(offsets[start], offsets[end])
            places = columns[own]
            if len(places) and not 0 <= places.min() <= places.max() < self.width:
                raise _damaged(self._file(part, ".columns"), f"columns beyond {self.width}")
            vectors = np.zeros((end - start, self.width), np.float32)
            vectors[np.repeat(np.arange(end - start), counts[start:end]), places] = values[own]
            return vectors

        return read

    def _file(self, part: int, what: str = "") -> Path:
        return self.folder / f"{part:05}{what}.npy"

    def _save(self, path: Path, values: npt.NDArray[np.generic]) -> None:
        with atomic_write(path) as file:
            # Into a file itself, numpy writes with an error that does not say "disk full".
            writer: Any = SimpleNamespace(write=file.write)
            np.save(writer, values, allow_pickle=False)

    def _load(self, path: Path, shape: tuple[int, ...], number: str) -> npt.NDArray[np.generic]:
        try:
            # Mapped: a part may be larger than memory, and a damaged header names any size.
            values: npt.NDArray[np.generic] = np.lib.format.open_memmap(regular(path), mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise DataError(
                f"cannot read {path}: {error}. Remove this part's files, and run the same samestep "
                "embed again."
            ) from error
        if values.shape != shape or values.dtype != number:
            raise _damaged(path, f"{values.dtype} {values.shape}, not {number} {shape}")
        return values


def _damaged(path: Path, found: str) -> DataError:
    return DataError(
        f"{path} has {found}. Remove this part's files, and run the same samestep embed again."
    )
