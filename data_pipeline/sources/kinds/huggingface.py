"""Datasets of the Hugging Face Hub, in any format that the library `datasets` reads.

Needs the extra `hf`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from glob import has_magic
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.sources import BadRecord, Problem, Record, Source, require
from data_pipeline.sources.columns import class_names, outer_columns
from data_pipeline.sources.kinds.jsonl import value_at
from samestep.errors import DataError

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Config:
    """Which dataset.

    Attributes:
        path: the repository, OWNER/NAME, or a folder: one that `save_to_disk` wrote, or one of data
            files.
        name: the subset, if there are several.
        split: the split to read.
        field: column of the text; dots reach into nested columns, unless a column's name has them.
        revision: commit, tag or branch of the repository. Name a commit: anything else may change
            between two builds.
    """

    path: str
    name: str | None = None
    split: str = "train"
    field: str = "text"
    revision: str | None = None

    def build(self) -> HuggingFace:
        """Names the dataset; it is opened when it is read."""
        require("datasets", "hf", "source.kind huggingface")
        return HuggingFace((self.title,), self)

    @property
    def title(self) -> str:
        """Name of the split in messages and manifests, such as "owner/name@v1 subset train"."""
        address = f"{self.path}@{self.revision}" if self.revision else self.path
        return " ".join(filter(None, (address, self.name, self.split)))

    def open(self, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
        """Opens the split: streamed, or downloaded into the cache of `datasets`.

        Raises:
            DataError: it does not exist, or cannot be reached.
        """
        import datasets

        saved_by_datasets = ("state.json", "dataset_dict.json")
        is_saved = any(Path(self.path, name).is_file() for name in saved_by_datasets)
        # `datasets` would read the files of "rows1" for the folder "rows[1]".
        if has_magic(self.path) and not is_saved:
            raise DataError(
                f"the dataset {self.path!r} is a pattern to `datasets`, which may read another "
                "folder. Rename the folder, without any of *?[."
            )
        try:
            if is_saved:
                saved = datasets.load_from_disk(self.path)
                return saved[self.split] if isinstance(saved, datasets.DatasetDict) else saved
            # Streaming reads from the Hub only. Without internet, a dataset can still be in the
            # cache, as a whole.
            streaming = streaming and not datasets.config.HF_HUB_OFFLINE
            return datasets.load_dataset(
                self.path, self.name, split=self.split, revision=self.revision, streaming=streaming
            )
        except Exception as error:  # the loaders of `datasets` raise errors of many packages
            raise DataError(
                f"cannot open the dataset {self.path!r} (name {self.name}, split {self.split}, "
                f"revision {self.revision}): {_reason(error)}. Correct the source, or, without "
                "internet, download it beforehand with `samestep fetch CONFIG`."
            ) from error

    def read(
        self,
        columns: Callable[[Sequence[str]], list[str]],
        encoder: Callable[[Mapping[str, list[str]]], Callable[[dict[str, Any]], bytes]],
    ) -> Iterator[Record]:
        """Streams the rows of the split; a record's line is its row, counted from 1.

        Args:
            columns: chooses the columns to read, by the names of all; raises BadRecord if the
                dataset lacks one.
            encoder: returns, for the names of classes by column (see `class_names`), the function
                that turns a row into the bytes of a record or a Problem.

        Raises:
            DataError: the split cannot be opened or read.
        """
        rows = self.open(streaming=True)
        if rows.column_names is not None:
            try:
                rows = rows.select_columns(columns(rows.column_names))
            except BadRecord as error:
                yield Record(0, 1, b"", 1.0, str(error))
                return
        encode = encoder({} if rows.features is None else class_names(rows.features.to_dict()))
        number, expected = 0, self._row_count(rows)
        try:
            for number, row in enumerate(rows, start=1):
                read = min(1.0, number / expected) if expected else 0.0
                yield Record.of(0, number, encode(row), read)
        except Exception as error:  # the loaders of `datasets` raise errors of many packages
            raise DataError(
                f"cannot read {self.title} after row {number}: {_reason(error)}. Run the same "
                "command again to resume."
            ) from error
        # A stream that breaks can look like one that ends.
        if number < max(1, expected):
            problem = f"the split ends before row {expected}" if expected else "empty split"
            yield Record(0, number + 1, b"", 1.0, problem)

    def _row_count(self, rows: datasets.Dataset | datasets.IterableDataset) -> int:
        """Number of rows as far as it is known; 0 if it is not."""
        if hasattr(rows, "num_rows"):
            return int(rows.num_rows)
        # A stream has no length, but its metadata may have one.
        info = (rows.info.splits or {}).get(self.split)
        return info.num_examples if info else 0


@dataclass(frozen=True)
class HuggingFace(Source):
    """Streams one split, one document per row."""

    config: Config

    def records(self) -> Iterator[Record]:
        return self.config.read(self._columns, lambda _: self._text)

    def _columns(self, names: Sequence[str]) -> list[str]:
        found = outer_columns(self.config.field, names)
        if not found:
            raise DataError(
                f"{self.files[0]} has no column {self.config.field!r}. Set source.field to one of: "
                f"{', '.join(names)}."
            )
        return found

    def _text(self, row: dict[str, Any]) -> bytes:
        try:
            text = value_at(row, self.config.field)
        except KeyError:
            text = None
        except BadRecord as error:
            return Problem.of(str(error))
        if isinstance(text, bytes):  # the workers decode it
            return text
        if not isinstance(text, str):
            return Problem.of(f"field {self.config.field!r} is not text")
        # Half a surrogate pair passes here, and the workers reject the document.
        return text.encode("utf-8", "surrogatepass")


def _reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
