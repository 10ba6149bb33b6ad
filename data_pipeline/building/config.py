"""The settings of `samestep data build`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from data_pipeline import dedup
from data_pipeline.building import decontamination
from data_pipeline.sources import SourceConfig
from data_pipeline.tokenizers.sentences import Splitter
from data_pipeline.tokenizers.tokenizer import Config as TokenizerConfig
from samestep.config import Kinds, parse_size
from samestep.errors import ConfigError


@dataclass(frozen=True)
class Config:
    """A dataset: its source, and how it is built.

    Attributes:
        source: where the raw text comes from.
        tokenizer: the tokenizer, and how `samestep data tokenizer` trains it.
        output: the dataset's folder.
        heldout_fraction: fraction of the documents, chosen by the hash of their text, that is held
            out for evaluation; not used if the source names files for that.
        shard_bytes: bytes of raw text in a shard, which is also the unit of work.
        limit: how much of the source is read, decompressed, such as "1GB": its first documents;
            None means all of it.
        rows: number of rows to train on: the first ones; None means all. Held-out rows, which have
            files of their own then, are not counted.
        sentences: how documents are split into sentences, which `packing: pairs` needs: "rules"
            (marks and blank lines) or "lines" (each line is a sentence); None omits boundaries.
        workers: number of processes; None means one per core.
        dedup: how documents that repeat an earlier one are found and left out; None keeps them.
        decontaminate: leaves out documents that contain text of a test.
        on_error: whether a record without a document stops the build ("stop"), or is counted,
            listed and left out ("skip").
        content_tokens: special tokens of the tokenizer, or unused ones of its vocabulary, that are
            content, such as markers of entities or speakers: a text that holds the name of one gets
            that token. No text produces the others.
    """

    source: Annotated[SourceConfig, Kinds("data_pipeline.sources.kinds")]
    tokenizer: TokenizerConfig
    output: str
    heldout_fraction: float = 0.005
    shard_bytes: int = 2**25
    limit: str | None = None
    rows: int | None = None
    sentences: Splitter | None = None
    dedup: Annotated[dedup.Config, Kinds("data_pipeline.dedup.kinds")] | None = None
    decontaminate: decontamination.Config | None = None
    workers: int | None = None
    on_error: Literal["stop", "skip"] = "stop"
    content_tokens: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.heldout_fraction < 1:
            raise ConfigError(
                f"heldout_fraction must be a fraction in [0, 1), not {self.heldout_fraction}"
            )
        if self.shard_bytes < 1:
            raise ConfigError(
                f"shard_bytes must be at least 1, not {self.shard_bytes}. The default is {2**25}."
            )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(
                f"workers must be at least 1, not {self.workers}. Leave it out for one per core."
            )
        if self.rows is not None and self.rows < 1:
            raise ConfigError(f"rows is {self.rows}. Use at least 1, or leave it out for all rows.")
        _ = self.limit_bytes  # rejects text that is no size

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes."""
        return None if self.limit is None else parse_size(self.limit, "limit")
