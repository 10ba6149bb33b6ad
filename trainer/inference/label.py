"""`samestep label`: rows labeled with the predictions of a fine-tuned model, to train a student.

`Labeler` is the model; `run` reads rows, labels them and writes them.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from data_pipeline.building import task_rows
from data_pipeline.building.task_rows import Encoded
from data_pipeline.packing.task_rows import wrong_number
from data_pipeline.sources import BadRecord, Record
from data_pipeline.sources.columns import row_of
from data_pipeline.sources.unlabeled import PASSAGES, Passages, Unlabeled
from samestep.errors import ConfigError, DataError
from samestep.examples import TaskRow
from samestep.progress import Progress
from samestep.storage import json_lines, shown
from trainer.accelerators import Precision
from trainer.inference.resumable import resumable, with_sizes
from trainer.inference.row_model import RowModel
from trainer.objectives.task_rows import means_of_rows
from trainer.training.weights.loading import load_weights

logger = logging.getLogger(__name__)

_ROWS = 2048  # read, labeled and written together; an interruption loses at most these
_DIGITS = 6


@dataclass(frozen=True)
class Columns:
    """Columns of rows to label.

    Attributes:
        texts: columns or templates of the texts; () takes the teacher's.
        label: the column to write; None takes the teacher's, or "scores" of passages.
        passages: whether each passage of a row is scored beside its query, the first of `texts`;
            these are then "query", "positive" and "negatives" by default, and the label is a list.
    """

    texts: tuple[str, ...] = ()
    label: str | None = None
    passages: bool = False


def run(
    checkpoint: str,
    file: str,
    output: Path,
    *,
    columns: Columns,
    skip: bool,
    precision: Precision,
    batch_tokens: int,
) -> None:
    """Labels the rows of a file, or resumes where an earlier call was stopped.

    Args:
        checkpoint: the teacher; see `load_weights`.
        file: path, pattern or address of the rows.
        output: a new JSON Lines file.
        columns: of the rows.
        skip: skip rows without these texts instead of stopping.
        precision: of matrix products.
        batch_tokens: positions of a batch, padding included.

    Raises:
        ConfigError: an option does not fit the teacher, or the file was begun with others.
        DataError: a row holds no texts.
    """
    json_lines.check_new(output, "--output")
    labeler = Labeler(checkpoint, precision)
    texts, column = _completed(columns, labeler, checkpoint)
    words = labeler.source.get("words", {})
    source = (Passages if columns.passages else Unlabeled).open(file, texts, words)
    if column in source.columns:
        raise ConfigError(f"--column {column!r} holds a text; name another column for the label")
    # The output depends on all of this; resuming with anything else would mix two outputs.
    made_of = {
        "teacher": labeler.identity,
        "files": with_sizes(source.files),
        "texts": [*texts, words],
        **({"passages": True} if columns.passages else {}),
        "column": column,
        "precision": precision,
        "batch_tokens": batch_tokens,
        "labels": list(labeler.labels),
    }
    # With a changed teacher or file, resuming stops with the name of what has changed.
    with resumable(output, made_of) as done, Progress("labeling", 1.0) as progress:
        if done.records:
            logger.info("resuming after row %d", done.records)
        logger.info("labeling on %s", labeler.device)
        records = islice(source.records(), done.records, None)
        # Rows of one read are batched by length and written in their own order; reads of 2048
        # leave little padding, and bound what an interruption loses.
        while read := list(islice(records, _ROWS)):
            kept, rows, counts = _encode(read, source, labeler, skip)
            labels = _named(labeler(rows, batch_tokens), labeler.labels)
            if columns.passages:
                scores = iter(labels)
                labels = [list(islice(scores, count)) for count in counts]
            lines = _lines(kept, labels, column)
            done.add("".join(lines).encode(), len(read), len(lines))
            progress.update(read[-1].read)
    skipped = done.records - done.rows
    logger.info("wrote %s: %d rows; %d were left out", output, done.rows, skipped)


def _completed(columns: Columns, labeler: Labeler, checkpoint: str) -> tuple[tuple[str, ...], str]:
    """The columns of the texts and of the label, by the teacher's data where none are given."""
    texts, label = columns.texts, columns.label
    if columns.passages:
        texts, label = texts or PASSAGES, label or "scores"
        if len(texts) < 2 or labeler.is_classifier:
            raise ConfigError(
                f"--passages is for a query, passages and a teacher with one score. --texts is "
                f"{' '.join(texts)}, and {checkpoint} has the labels {', '.join(labeler.labels)}."
            )
    texts = texts or tuple(labeler.source.get("texts", ()))
    if not texts:
        raise ConfigError(
            f"{checkpoint} does not say which columns of its dataset hold the texts. Name them "
            "with --texts, or add --passages if rows have a query and passages."
        )
    # Rows are labeled as the teacher's own were read, so a student can be trained with the same
    # source settings, and `soft` for probabilities.
    label = label or labeler.source.get("label", "label" if labeler.is_classifier else "score")
    return texts, label


def _encode(
    read: list[Record], source: Unlabeled, labeler: Labeler, skip: bool
) -> tuple[list[Record], list[Encoded], list[int]]:
    """The records that hold texts, the tokens of all their rows, and each one's number of rows.

    Raises:
        DataError: a record does not, and `skip` is false.
    """
    parsed: list[list[TaskRow] | str] = []  # or the problem of a record
    for record in read:
        try:
            parsed.append(source.rows(record))
        except BadRecord as error:
            parsed.append(str(error))
    # The rows are tokenized together, which is faster, and put back beside their records.
    texts = [row for rows in parsed if not isinstance(rows, str) for row in rows]
    encoded = iter(task_rows.encode(texts, labeler.tokenizer, "classification"))
    kept: list[Record] = []
    found: list[Encoded] = []
    counts: list[int] = []
    for record, rows in zip(read, parsed, strict=True):
        of_record = [rows] if isinstance(rows, str) else [next(encoded) for _ in rows]
        problem = next((row for row in of_record if isinstance(row, str)), None)
        of_rows = [row for row in of_record if not isinstance(row, str)]
        wrong = (wrong_number(len(row.parts), labeler.spec) for row in of_rows)
        problem = problem or next(filter(None, wrong), None)
        if problem is None:
            kept.append(record)
            found += of_rows
            counts.append(len(of_rows))
        elif not skip:
            raise DataError(
                f"{shown(source.files[record.file])}:{record.line}: {problem}; correct or remove "
                "the row, name the columns of the texts with --texts, or use --on-error skip"
            )
    return kept, found, counts


def _lines(records: Sequence[Record], labels: Sequence[object], column: str) -> list[str]:
    """The records as JSON Lines, with their labels."""
    rows = zip(records, labels, strict=True)
    return [json_lines.line({**row_of(record.data), column: label}) for record, label in rows]


def _named(labels: npt.NDArray[np.float32], names: tuple[str, ...]) -> list[object]:
    """The number of each row, or its probabilities by the name of a class: [N, C] -> N values."""
    # Rounded, or most of the file would be digits below the precision of the model.
    values = labels.astype(float).round(_DIGITS).tolist()
    return [dict(zip(names, row, strict=True)) if len(row) > 1 else row[0] for row in values]


class Labeler(RowModel):
    """A classifier or regression model that labels rows.

    Attributes:
        identity: changes with the weights.

    Args:
        checkpoint: see `load_weights`.
        precision: of matrix products.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigError: its model has no classification head.
    """

    def __init__(self, checkpoint: str, precision: Precision = "fp32") -> None:
        weights = load_weights(checkpoint)
        head = weights.config.head
        if head != "classification":
            raise ConfigError(
                f"{checkpoint} has the head {head}; name a run of objective classification, "
                "regression or ranking"
            )
        super().__init__(weights, precision)
        self.identity = weights.identity()

    @property
    def is_classifier(self) -> bool:
        """Whether labels are probabilities of classes, not numbers."""
        return len(self.labels) > 1

    def __call__(self, rows: Sequence[Encoded], batch_tokens: int) -> npt.NDArray[np.float32]:
        """Labels rows, in batches of similar length.

        Args:
            rows: N of them.
            batch_tokens: positions of a batch, padding included.

        Returns:
            float32 [N, C], probabilities of the classes; [N, 1] for a regression model.
        """
        found = np.empty((len(rows), len(self.labels)), dtype=np.float32)
        for numbers, examples, logits in self.batches(rows, batch_tokens):
            assert examples.labels is not None
            document = examples.labels.document
            means = torch.from_numpy(means_of_rows(logits.numpy(), document))
            found[numbers] = (means.softmax(-1) if self.is_classifier else means).numpy()
        return found
