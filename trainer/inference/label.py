"""`samestep label`: what a fine-tuned model makes of rows without labels, for a student to learn from."""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from trainer.command import Commands, add_command, progress_bar
from trainer.errors import EXIT_DONE, ConfigError, DataError
from trainer.storage import json_lines

if TYPE_CHECKING:
    from data_pipeline.sources import Record
    from data_pipeline.sources.unlabelled import Unlabelled
    from trainer.inference.labeller import Labeller

logger = logging.getLogger(__name__)

_ROWS = 2048  # that are read, labelled and written together; a run that is stopped loses no more
_DIGITS = 6


def register(commands: Commands) -> None:
    """Adds `label` to the `samestep` command."""
    parser = add_command(
        commands,
        "label",
        _run,
        "label rows with what a fine-tuned model makes of them, for a student to learn from",
        "Each row is written with all its columns and, in the column of the label, the probability of each class, or\n"
        "the number. Stopped at any moment, the same command goes on where it was.\n\n"
        "examples:\n"
        "  samestep label runs/sst2 reviews.jsonl.zst --output labelled.jsonl.zst\n"
        "  samestep label runs/mnli 'pairs/*.parquet' --texts premise hypothesis --output labelled.jsonl.zst",
        "Label rows with what a fine-tuned model makes of them, for a student to learn from.",
    )
    parser.add_argument(
        "checkpoint", metavar="TEACHER", help="a run of objective classification or regression, or a step of it, its "
        "folder or address; a Hugging Face folder or hf://NAME"
    )  # fmt: skip
    parser.add_argument(
        "file", metavar="FILE", help="rows: .jsonl, .json, .csv, .tsv or .parquet, also .gz or .zst; a path, a pattern "
        "or an address"
    )  # fmt: skip
    parser.add_argument(
        "--output", required=True, metavar="OUT", help="a new file: .jsonl, .jsonl.gz or .jsonl.zst"
    )
    parser.add_argument(
        "--texts",
        nargs="+",
        metavar="TEXT",
        help="columns, or templates of them (default: those of the teacher's data)",
    )
    parser.add_argument(
        "--column", help="the column of the label (default: that of the teacher's data)"
    )
    parser.add_argument(
        "--on-error",
        choices=("stop", "skip"),
        default="stop",
        help="what is done about a row without these texts",
    )
    parser.add_argument(
        "--precision", choices=("fp32", "bf16"), default="fp32", help="of matrix products"
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=16384,
        metavar="N",
        help="computed at a time (default: 16384)",
    )


def _run(args: argparse.Namespace) -> int:
    from data_pipeline.sources.unlabelled import Unlabelled
    from trainer.inference.labeller import Labeller

    output = Path(args.output)
    json_lines.check_new(output, "--output")
    if args.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens must be at least 1, not {args.batch_tokens}")
    labeller = Labeller(args.checkpoint, args.precision)
    texts = tuple(args.texts or labeller.source.get("texts", ()))
    if not texts:
        raise ConfigError(
            f"what {args.checkpoint} was fine-tuned on is not there to say which columns hold texts; name them with "
            "--texts"
        )
    kind = "label" if len(labeller.labels) > 1 else "score"
    column = args.column or labeller.source.get("label", kind)
    words = labeller.source.get("words", {})
    source = Unlabelled.open(args.file, texts, words)
    if column in source.columns:
        raise ConfigError(
            f"the column {column!r} holds a text; name another one for the label with --column"
        )
    made_of = {
        "teacher": labeller.identity,
        "files": [
            [file, os.path.getsize(file) if os.path.isfile(file) else None] for file in source.files
        ],
        "texts": [*texts, words],
        "column": column,
        "precision": args.precision,
        "batch_tokens": args.batch_tokens,
    }
    with _growing(output, made_of) as grown, progress_bar(100) as bar:
        if grown.records:
            logger.info("going on after row %d", grown.records)
        logger.info("labelling on %s", labeller.device)
        records = islice(source.records(), grown.records, None)
        while read := list(islice(records, _ROWS)):
            lines = list(_labelled(read, source, labeller, column, args))
            grown.add("".join(lines).encode(), len(read), len(lines))
            bar.update(bar.task_ids[0], completed=int(100 * read[-1].read))
    logger.info("wrote %s: %d rows%s", output, grown.rows, _left_out(grown.records - grown.rows))
    if len(labeller.labels) > 1:
        logger.info(
            "%s holds the probabilities of, in this order: %s", column, ", ".join(labeller.labels)
        )
    return EXIT_DONE


def _left_out(count: int) -> str:
    return f"; {count} were left out" if count else ""


def _labelled(
    read: list[Record],
    source: Unlabelled,
    labeller: Labeller,
    column: str,
    args: argparse.Namespace,
) -> Iterator[str]:
    """The lines of records that hold texts.

    Raises:
        DataError: one does not, and is not to be left out.
    """
    from data_pipeline.building.task_rows import Encoded
    from data_pipeline.sources import BadRecord
    from data_pipeline.sources.columns import row_of
    from trainer.storage import shown

    def refuse(record: Record, reason: str) -> None:
        if args.on_error == "stop":
            raise DataError(
                f"{shown(source.files[record.file])}:{record.line}: {reason}; correct or remove the row, name the "
                "columns of the texts with --texts, or leave such rows out with --on-error skip"
            )

    good, rows = [], []
    for record in read:
        try:
            rows.append(source.parse_row(record))
            good.append(record)
        except BadRecord as error:
            refuse(record, str(error))
    encoded: list[tuple[Record, Encoded]] = []
    for record, row in zip(good, labeller.encode(rows), strict=True):
        if isinstance(row, str):
            refuse(record, row)
        else:
            encoded.append((record, row))
    if not encoded:
        return
    found = (
        labeller([row for _, row in encoded], args.batch_tokens)
        .astype(float)
        .round(_DIGITS)
        .tolist()
    )
    for (record, _), label in zip(encoded, found, strict=True):
        columns = {**row_of(record.data), column: label if len(label) > 1 else label[0]}
        yield json_lines.line(columns)


class _Growing:
    """A file that grows piece by piece, and what it has so far.

    Attributes:
        records: that have been read for it.
        rows: that are in it.

    Args:
        file: the file.
        path: where its state is kept.
        made_of: what its content depends on.

    Raises:
        ConfigError: it was begun with another.
    """

    def __init__(self, file: BinaryIO, path: Path, made_of: dict[str, Any]) -> None:
        self._file, self._path, self._made_of = file, path, made_of
        self.records, self.rows, size = 0, 0, 0
        state: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"bytes": 0}
        if 0 < state["bytes"] <= os.fstat(file.fileno()).st_size:  # else the file was removed
            if changed := [
                name for name, value in made_of.items() if state["made_of"].get(name) != value
            ]:
                raise ConfigError(
                    f"{path} says that the output was begun with another {' and '.join(changed)}; put that back, or "
                    "remove the file to begin anew"
                )
            self.records, self.rows, size = state["records"], state["rows"], state["bytes"]
        file.truncate(size)  # what was written after the last piece that counts
        file.seek(size)

    def add(self, lines: bytes, records: int, rows: int) -> None:
        """Appends lines, which count once they are on the disk."""
        from trainer.storage import write_text

        self._file.write(json_lines.compressed(lines, self._path.name.removesuffix(".progress")))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.records, self.rows = self.records + records, self.rows + rows
        counts = {"records": self.records, "rows": self.rows, "bytes": self._file.tell()}
        write_text(self._path, json.dumps({**counts, "made_of": self._made_of}))


@contextmanager
def _growing(output: Path, made_of: dict[str, Any]) -> Iterator[_Growing]:
    """A new file, which appears under its name once it is whole; until then it and its state lie beside it.

    Raises:
        ConfigError: another process writes it, or it was begun otherwise.
    """
    import fcntl

    partial, state = (
        output.with_name(f"{output.name}.{suffix}") for suffix in ("partial", "progress")
    )
    with open(partial, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise ConfigError(
                f"another process writes {output}; wait for it, or name another file"
            ) from None
        grown = _Growing(file, state, made_of)
        try:
            yield grown
        finally:
            if not grown.records:
                partial.unlink()  # as where columns have other names
        partial.replace(output)
    state.unlink(missing_ok=True)
