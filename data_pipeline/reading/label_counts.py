"""How many rows of each split have each label of a task."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from data_pipeline.packing import Int64
from data_pipeline.reading.dataset import Dataset
from data_pipeline.reading.passage_counts import count_passages
from samestep.errors import ConfigError, DataError

logger = logging.getLogger(__name__)

_SHOWN = 20  # labels in a line of the log


@dataclass(frozen=True)
class LabelCounts:
    """The number of rows with each label; of tagging, the number of words with each tag.

    Attributes:
        labels: of the task.
        splits: split -> int64 [labels]; without splits that have no rows.
    """

    labels: tuple[str, ...]
    splits: Mapping[str, Int64]

    def rows(self) -> Iterator[tuple[str, list[str]]]:
        """Yields each label with its number in each split, formatted."""
        for number, label in enumerate(self.labels):
            yield label, [f"{counts[number]:,}" for counts in self.splits.values()]

    def line(self) -> str:
        """The counts of all labels in a line; of many labels, the most frequent ones."""
        total = np.sum([*self.splits.values()], axis=0)
        # The most frequent labels are chosen, and shown in the order of the labels.
        chosen = np.argsort(-total, kind="stable")[:_SHOWN]
        cells = dict(self.rows())
        shown = [f"{(name := self.labels[i])} {' / '.join(cells[name])}" for i in sorted(chosen)]
        more = len(self.labels) - len(shown)
        return f"labels ({' / '.join(self.splits)}): {', '.join(shown)}" + (
            f", and {more} rarer ones" if more else ""
        )

    def warnings(self) -> list[str]:
        """What a model cannot learn: labels that no training row has."""
        train, heldout = self.splits.get("train"), self.splits.get("heldout")
        if train is None:
            return []
        missing = np.flatnonzero(train == 0).tolist()
        # Worse than an unused label: held-out rows with it are always scored as wrong.
        scored = [i for i in missing if heldout is not None and heldout[i]]
        found = []
        if unseen := [self.labels[i] for i in missing if i not in scored]:
            found.append(f"no training row has {_listed(unseen)}, so no model can learn it")
        if scored and heldout is not None:
            names = _listed([f"{self.labels[i]} ({heldout[i]:,})" for i in scored])
            found.append(f"held-out rows have labels that no training row has: {names}")
        return found


def training_counts(sources: Mapping[str, Dataset]) -> list[int]:
    """The number of training rows of each label, or of words of each tag.

    Args:
        sources: a single dataset.

    Raises:
        ConfigError: there are several, or rows without labels.
    """
    if len(sources) > 1:
        raise ConfigError(
            "class_weights is balanced, and data.sources mixes several datasets by weights of "
            "their own. Name the weights of the labels."
        )
    (dataset,) = sources.values()
    counts = count_labels(dataset)
    if counts is None or "train" not in counts.splits:
        raise ConfigError(
            f"class_weights is balanced, and {dataset.name} has no training rows with labels. Name "
            "the weights."
        )
    return [int(count) for count in counts.splits["train"]]


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _SHOWN
    shown = ", ".join(f"the label {name}" if len(names) == 1 else name for name in names[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown


def log_counts(dataset: Dataset) -> None:
    """Logs what the rows of a dataset have: labels, or passages.

    Raises:
        DataError: a shard is damaged.
    """
    if (labels := count_labels(dataset)) is not None:
        logger.info("%s", labels.line())
        for warning in labels.warnings():
            logger.warning("%s", warning)
    if (rows := count_passages(dataset)) is not None:
        logger.info("%s", rows)


def count_labels(dataset: Dataset) -> LabelCounts | None:
    """Counts the labels of a dataset; None unless its rows have classes or tags.

    A row with probabilities counts as its most probable class.

    Raises:
        DataError: a shard is damaged.
    """
    task = dataset.manifest.task
    if task is None or task.kind not in ("classification", "tagging"):
        return None
    splits = {}
    for split in ("train", "heldout"):
        counts = np.zeros(len(task.labels), dtype=np.int64)
        for info in dataset.manifest.splits.get(split, ()):
            shard = dataset.read_index(info, labels=True)
            label = shard.labels
            if task.kind == "classification" and (np.diff(shard.label_start) > 1).any():
                # Rows with one label and rows with a probability for each lie end to end: of two
                # labels, 1 | 0.2 0.8 | 0 has the starts 0, 1, 3, 4 and the classes 1, 1, 0.
                parts = np.split(shard.labels, shard.label_start[1:-1])
                label = np.array([each.argmax() if each.size > 1 else each[0] for each in parts])
            # Tags are stored for each token, with -1 where no word begins.
            # A stranger's shard may hold any number.
            found = np.bincount(label[label >= 0].astype(np.int64), minlength=len(counts))
            if len(found) > len(counts):
                raise DataError(
                    f"{dataset.name}/{info.name} has the label number {len(found) - 1}, and its "
                    f"manifest names {len(counts)} labels. Build the dataset again."
                )
            counts += found
        if dataset.manifest.splits.get(split):
            splits[split] = counts
    return LabelCounts(task.labels, splits)
