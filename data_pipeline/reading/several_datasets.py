"""Opens several datasets as one, and merges examples of several into a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from data_pipeline.order.sources import Source
from data_pipeline.packing import Int64, ranges
from data_pipeline.reading.dataset import Dataset
from samestep.errors import ConfigError, DataError
from samestep.examples import Examples, Labels

if TYPE_CHECKING:
    from data_pipeline.reading.cache import ShardCache
    from data_pipeline.tokenizers.tokenizer import Tokenizer


@dataclass(frozen=True)
class ConcatDataset:
    """The datasets of a mixture, by name."""

    sources: dict[str, Dataset]

    @classmethod
    def open(
        cls, sources: Sequence[Source], cache: ShardCache | None, *, whole: bool = True
    ) -> ConcatDataset:
        """Opens datasets with the same tokenizer; `whole` as for `Dataset.open`.

        Raises:
            ConfigError: a dataset is listed twice.
            DataError: one is unfinished or damaged, or has another tokenizer.
        """
        opened: dict[str, Dataset] = {}
        for source in sources:
            dataset = Dataset.open(source.path, cache, whole=whole)
            # Ids of different tokenizers mean different tokens, which nothing later would notice.
            for other in opened.values():
                if dataset.manifest.tokenizer_fingerprint != other.manifest.tokenizer_fingerprint:
                    raise DataError(
                        f"{other.name} and {dataset.name} were built with different tokenizers. "
                        "Build one of them again with "
                        f"tokenizer.path={other.path / 'tokenizer'}."
                    )
                if dataset.manifest.digest == other.manifest.digest:
                    raise ConfigError(
                        f"data.sources lists the same dataset twice, {other.name} and "
                        f"{dataset.name}. List it once, with the sum of the weights."
                    )
            opened[source.label] = dataset
        return cls(opened)

    @property
    def name(self) -> str:
        """Their locations, for messages."""
        return ", ".join(dataset.name for dataset in self.sources.values())

    @property
    def tokenizer(self) -> Tokenizer:
        """Their common tokenizer.

        Raises:
            DataError: the first dataset's folder has another one.
        """
        return next(iter(self.sources.values())).tokenizer


def merge(parts: Sequence[tuple[Int64, Examples]], weight: npt.NDArray[np.float32]) -> Examples:
    """Merges examples of several datasets into one batch.

    Args:
        parts: the rows of the batch that come from a dataset, and their examples.
    """
    rows, examples = zip(*parts, strict=True)
    # Rows 0 and 2 of the batch come from dataset A, row 1 from B. A counts its rows 0 and 1, which
    # become 0 and 2; then chunks are sorted by row.
    row = np.concatenate([mine[each.row] for mine, each in parts])
    pieces = np.argsort(row, kind="stable")
    length = np.concatenate([each.length for each in examples])
    tokens = ranges((np.cumsum(length) - length)[pieces], length[pieces])
    by_row = np.argsort(np.concatenate(rows))
    random = [each.random for each in examples if each.random is not None]
    paired = [each.paired for each in examples if each.paired is not None]
    return Examples(
        tokens=np.concatenate([each.tokens for each in examples])[tokens],
        row=row[pieces],
        column=np.concatenate([each.column for each in examples])[pieces],
        length=length[pieces],
        key=np.concatenate([each.key for each in examples])[by_row],
        weight=weight,
        isolated=examples[0].isolated,
        random=np.concatenate(random)[by_row] if random else None,
        paired=np.concatenate(paired)[by_row] if paired else None,
        labels=_merge_labels([each.labels for each in examples if each.labels is not None], by_row),
    )


def _merge_labels(parts: Sequence[Labels], by_row: Int64) -> Labels | None:
    """Merges the labels of several datasets; `by_row` sorts their rows."""
    if not parts:
        return None
    count = np.concatenate([each.count for each in parts])
    ranks = [
        np.zeros(len(each.count), np.bool_) if each.ranks is None else each.ranks for each in parts
    ]
    passages = [each.passages for each in parts if each.passages is not None]
    values = ranges((np.cumsum(count) - count)[by_row], count[by_row])
    return Labels(
        values=np.concatenate([each.values for each in parts])[values],
        count=count[by_row],
        document=np.concatenate([each.document for each in parts])[by_row],
        begin=np.concatenate([each.begin for each in parts])[by_row],
        examples=np.concatenate([each.examples for each in parts])[by_row],
        ranks=np.concatenate(ranks)[by_row] if any(each.any() for each in ranks) else None,
        passages=np.concatenate(passages)[by_row] if passages else None,
    )
