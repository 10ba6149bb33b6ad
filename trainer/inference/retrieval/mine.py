"""`samestep mine`: hard negatives of queries, by any number of processes."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypedDict

from samestep.errors import ConfigError, DataError
from samestep.hashing import json_hash
from samestep.progress import Progress
from samestep.storage import json_lines, make_folder
from samestep.stored_json import damage_of, parse_json
from samestep.untrusted import read_regular
from trainer.inference.retrieval.embed import made_of, write_missing
from trainer.inference.retrieval.jobs import alone, meet
from trainer.inference.retrieval.negatives import BATCH_TOKENS, Choice, Chosen, Miner
from trainer.inference.retrieval.pairs import Pairs
from trainer.inference.retrieval.rerank import CrossEncoder
from trainer.inference.retrieval.sentences import Given, SentenceEncoder
from trainer.inference.retrieval.vectors import Vectors
from trainer.strategies.world import World

logger = logging.getLogger(__name__)

Fewer: TypeAlias = Literal["error", "keep", "skip"]

_PASSAGES, _QUERIES = 2048, 1024  # of a part; an interruption loses the parts in progress
_DIGITS = 6
_LISTED = 20


@dataclass(frozen=True)
class Output:
    """What is written.

    Attributes:
        file: a new file of JSON Lines; until it is complete, there is a folder beside it.
        scores: whether similarities are written.
        teacher: a cross-encoder whose scores are written instead.
        fewer: what to do with queries that have fewer negatives.
    """

    file: Path
    scores: bool
    teacher: str | None
    fewer: Fewer


class _Mined(TypedDict):
    query_id: str
    negative_ids: list[str]


def mine(
    checkpoint: str,
    pairs: Pairs,
    output: Output,
    choice: Choice,
    given: Given,
    world: World,
) -> None:
    """Writes negatives of each query; goes on where an earlier call was stopped.

    Part i of the passages and of the queries is computed by process i modulo their number.

    Args:
        given: see `SentenceEncoder`.
        world: of `jobs.processes`.

    Raises:
        ConfigError: another job writes the file, or it was begun with another model or other
            passages; or queries have fewer negatives.
        DataError: a file that an earlier call has written is damaged.
    """
    json_lines.check_new(output.file, "--output")
    encoder = SentenceEncoder(checkpoint, given)
    teacher = None
    if output.teacher is not None:
        teacher = CrossEncoder(output.teacher, "--teacher", BATCH_TOKENS)
    work = output.file.with_name(f"{output.file.name}.work")
    make_folder(work)
    with alone(work, world):
        passages, rows = pairs.digests()
        vectors = Vectors.begin(
            work / "passages",
            pairs.names,
            part=_PASSAGES,
            width=encoder.width,
            number="float32",
            similarity=encoder.pooling.similarity,
            sparse=encoder.is_sparse,
            made_of=made_of(encoder, "document", passages),
        )
        logger.info("embedding %d passages on %s", len(pairs.texts), encoder.device)
        own = range(world.rank, vectors.parts, world.size)
        texts = {part: pairs.texts[part * _PASSAGES :][:_PASSAGES] for part in own}
        write_missing(vectors, texts, encoder, "document", BATCH_TOKENS)
        meet(world, "passages")

        # Other settings get a folder of their own, and need no new vectors.
        settings = [asdict(choice), rows, output.scores, teacher and teacher.identity]
        folder = work / f"negatives-{json_hash(settings)[:16]}"
        parts = [folder / f"{part:05}.jsonl" for part in range(-(-len(pairs.rows) // _QUERIES))]
        miner = Miner(pairs, vectors, encoder, teacher, choice)
        own = range(world.rank, len(parts), world.size)
        missing = [part for part in own if not parts[part].is_file()]
        if there := len(own) - len(missing):
            logger.info("%d of %d parts of the queries are there already", there, len(own))
        with Progress("mining", len(missing)) as progress:
            for part in missing:
                mined = miner(pairs.rows[part * _QUERIES :][:_QUERIES])
                has_scores = output.scores or teacher is not None
                # A part appears once it is complete, so a kill leaves none that is half written.
                json_lines.write(parts[part], (_line(pairs, row, has_scores) for row in mined))
                progress.advance(1)
        meet(world, "queries")
        if world.rank == 0:
            # Another job may have written it since this one began.
            json_lines.check_new(output.file, "--output")
            _join(parts, output, choice.negatives)
            shutil.rmtree(work)


def _line(pairs: Pairs, mined: Chosen, scores: bool) -> dict[str, object]:
    """A line of the output, which the source `retrieval` reads."""
    row = mined.row
    positives = [pairs.texts[number] for number in row.positives]
    ids = [pairs.names[number] for number in row.positives]
    line: dict[str, object] = {
        "query": row.query,
        "positive": positives[0] if len(ids) == 1 else positives,
        "negatives": [pairs.texts[number] for number in mined.negatives],
        "query_id": row.name,
        "positive_id": ids[0] if len(ids) == 1 else ids,
        "negative_ids": [pairs.names[number] for number in mined.negatives],
    }
    if scores:
        line["scores"] = [round(score, _DIGITS) for score in mined.scores]
    return line


def _join(parts: Sequence[Path], output: Output, negatives: int) -> None:
    """Writes the lines of all parts into one file.

    Raises:
        ConfigError: `output.fewer` is "error", and a query has fewer negatives.
    """
    # Read twice, here and below, as all rows of a large set need not fit into memory.
    found = [(row["query_id"], len(row["negative_ids"])) for row in _mined(parts)]
    lacking = [f"{query}: {count}" for query, count in found if count < negatives]
    if lacking:
        more = f" and {len(lacking) - _LISTED} more" if len(lacking) > _LISTED else ""
        listed = (
            f"{len(lacking)} queries have fewer than {negatives} negatives ("
            f"{', '.join(lacking[:_LISTED])}{more})"
        )
        if output.fewer == "error":
            raise ConfigError(
                f"{listed}. Widen --range, narrow a margin, or add --fewer keep or --fewer skip; "
                "the passages need not be embedded again."
            )
        logger.warning("%s: %s", listed, "left out" if output.fewer == "skip" else "kept")
        logger.debug("queries with fewer negatives: %s", ", ".join(lacking))
    least = negatives if output.fewer == "skip" else 0
    json_lines.write(
        output.file, (row for row in _mined(parts) if len(row["negative_ids"]) >= least)
    )
    rows = sum(count >= least for _, count in found)
    logger.info("wrote %s: %d queries", output.file, rows)


def _mined(parts: Sequence[Path]) -> Iterator[_Mined]:
    for file in parts:
        with damage_of(file, DataError, "Remove it, and run the same command again."):
            for line in read_regular(file).splitlines():
                yield parse_json(line, _Mined)
