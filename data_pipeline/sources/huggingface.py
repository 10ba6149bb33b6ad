"""Datasets of the Hugging Face Hub in any format that its library `datasets` (extra `hf`) reads;
one row a document.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data_pipeline.sources import Record, Source
from trainer.errors import DataError, MissingExtra

if TYPE_CHECKING:
    import datasets


@dataclass(frozen=True)
class Config:
    """Which dataset.

    Attributes:
        path: the repository, OWNER/NAME, or a folder: one that `save_to_disk` wrote, or one of data
            files.
        name: the subset, where there are several.
        split: the part to read.
        field: the column of the text; dots reach into nested columns.
        revision: a commit, tag or branch of the repository. Name a commit: anything else may change
            between two builds.
    """

    path: str
    name: str | None = None
    split: str = "train"
    field: str = "text"
    revision: str | None = None

    def build(self) -> HuggingFace:
        """Names the dataset; it is opened when it is read.

        Raises:
            MissingExtra: `datasets` is not installed.
        """
        try:
            import datasets  # noqa: F401
        except ImportError:
            raise MissingExtra("datasets", "hf", "source.kind huggingface") from None
        address = f"{self.path}@{self.revision}" if self.revision else self.path
        return HuggingFace((" ".join(filter(None, (address, self.name, self.split))),), self)

    def open(self, streaming: bool) -> datasets.Dataset | datasets.IterableDataset:
        """The split: streamed, or downloaded into the cache of `datasets`.

        Raises:
            DataError: there is none of this name, or it cannot be reached.
        """
        import datasets

        try:
            if (
                Path(self.path, "state.json").is_file()
                or Path(self.path, "dataset_dict.json").is_file()
            ):
                saved = datasets.load_from_disk(self.path)
                return saved[self.split] if isinstance(saved, datasets.DatasetDict) else saved
            streaming = (
                streaming and not datasets.config.HF_HUB_OFFLINE
            )  # the cache holds whole datasets
            return datasets.load_dataset(
                self.path, self.name, split=self.split, revision=self.revision, streaming=streaming
            )
        except Exception as error:  # of whatever package a loader of `datasets` uses
            raise DataError(
                f"cannot open the dataset {self.path!r} (name {self.name}, split {self.split}, "
                "revision "
                f"{self.revision}): {reason(error)}; correct the source, or, where there is no "
                "internet, get it ahead "
                "with `samestep fetch CONFIG`"
            ) from error


@dataclass(frozen=True)
class HuggingFace(Source):
    """Streams the rows of one split; a record's line is its row, counted from 1."""

    config: Config

    def records(self) -> Iterator[Record]:
        rows = self.config.open(streaming=True)
        top, *inner = self.config.field.split(".")
        if rows.column_names is not None and top not in rows.column_names:
            raise DataError(
                f"{self.files[0]} has no column {top!r}; set source.field to one of: "
                f"{', '.join(rows.column_names)}"
            )
        expected, row = row_count(rows, self.config.split), 0
        try:
            for row, columns in enumerate(rows.select_columns([top]), start=1):
                text = functools.reduce(_get, inner, columns[top])
                share = min(1.0, row / expected) if expected else 0.0
                if isinstance(text, str):
                    yield Record(0, row, text.encode("utf-8", "surrogatepass"), share)
                else:
                    yield Record(0, row, b"", share, f"field {self.config.field!r} is not text")
        except Exception as error:  # of whatever package a loader of `datasets` uses
            raise DataError(
                f"cannot read {self.files[0]} after row {row}: {reason(error)}; run the same "
                "command again to go on"
            ) from error
        if row < expected:
            yield Record(0, row + 1, b"", 1.0, f"the split ends before row {expected}")


def row_count(rows: datasets.Dataset | datasets.IterableDataset, split: str) -> int:
    """The rows of the split as far as is known; 0 if it is not."""
    if hasattr(rows, "num_rows"):
        return int(rows.num_rows)
    info = (rows.info.splits or {}).get(split)
    return info.num_examples if info else 0


def _get(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def reason(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__
