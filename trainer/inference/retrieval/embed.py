"""`samestep embed` and `samestep search`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from data_pipeline.sources import BadRecord
from data_pipeline.sources.files import read_records, uncompressed
from data_pipeline.sources.kinds.jsonl import lines, load_json, text_of, value_at
from samestep import environment
from samestep.errors import ConfigError, DataError
from samestep.progress import Progress
from samestep.storage import json_lines, shown
from trainer.accelerators.detect import for_any_shapes
from trainer.inference.resumable import with_sizes
from trainer.inference.retrieval import search as exact
from trainer.inference.retrieval.sentences import Pooling, SentenceEncoder
from trainer.inference.retrieval.vectors import Number, Vectors

logger = logging.getLogger(__name__)

_QUERIES_AT_A_TIME = 1024


def embed(
    checkpoint: str,
    file: str,
    field: str | None,
    output: Path,
    *,
    role: str,
    changed: Callable[[Pooling], Pooling],
    number: Number,
    part: int,
    batch_tokens: int,
) -> None:
    """Writes the vectors of the texts in a file; goes on where an earlier call was stopped.

    Of several processes, each makes every so many parts, so vectors do not depend on their number.

    Args:
        role: of the texts, by which a prompt is chosen: query or document.
        changed: see `SentenceEncoder`.
        part: number of texts of a file, which an interruption may lose.

    Raises:
        ConfigError: the folder was begun with something else.
        DataError: a line holds no text.
    """
    names, texts = map(list, zip(*named_texts(file, field), strict=True))
    encoder = SentenceEncoder(checkpoint, changed)
    made_of = {
        "model": encoder.identity,
        "pooling": asdict(encoder.pooling),
        "role": role,
        "file": with_sizes([file]),
        "field": field,
    }
    vectors = Vectors.begin(
        output,
        names,
        part=part,
        width=encoder.width,
        number=number,
        similarity=encoder.pooling.similarity,
        made_of=made_of,
    )
    rank, processes = environment.launcher_rank() or 0, environment.number("WORLD_SIZE", 1)
    own = range(rank, vectors.parts, processes)
    missing = [index for index in own if not vectors.has(index)]
    if len(missing) < len(own):
        logger.info("%d of %d parts are there already", len(own) - len(missing), len(own))
    logger.info("embedding %d texts on %s", len(texts), encoder.device)
    # The first process of a job keeps other jobs away.
    lock = vectors.locked() if rank == 0 else nullcontext()
    with lock, Progress("embedding", len(missing)) as progress:
        for index in missing:
            own_texts = texts[index * part : (index + 1) * part]
            with_prompts = encoder.for_role("query" if role == "query" else "document", own_texts)
            vectors.write(index, encoder(with_prompts, batch_tokens))
            progress.advance(1)
    if encoder.truncated:
        logger.warning("%d texts are longer than the model reads; truncated", encoder.truncated)
    logger.info("wrote %s: %s %d x %d", output, number, vectors.texts, vectors.width)


def search(
    checkpoint: str,
    folder: Path,
    queries: str,
    field: str | None,
    output: Path | None,
    k: int,
    changed: Callable[[Pooling], Pooling],
) -> Iterator[dict[str, object]]:
    """Yields each query with its `k` nearest texts in a folder of `embed`, from the nearest on.

    Raises:
        ConfigError: the vectors are another model's.
        DataError: the folder or the file of queries is damaged.
    """
    if output is not None:
        json_lines.check_new(output, "--output")
    vectors = Vectors.open(folder)
    named = list(named_texts(queries, field))
    encoder = SentenceEncoder(checkpoint, changed)
    if encoder.identity != vectors.made_of.get("model"):
        raise ConfigError(
            f"{folder} was embedded by another model than {checkpoint}. Name that model, or embed "
            "the texts again."
        )
    device = for_any_shapes().device
    for first in range(0, len(named), _QUERIES_AT_A_TIME):
        group = named[first : first + _QUERIES_AT_A_TIME]
        texts = encoder.for_role("query", [text for _, text in group])
        found = encoder(texts).to(device)
        products, rows = exact.top(*comparable(vectors.similarity, found, vectors.blocks()), k)
        for (name, _), scores, places in zip(group, products, rows, strict=True):
            hits = [
                {"id": vectors.names[place], "score": round(float(score), 6)}
                for score, place in zip(scores, places, strict=True)
            ]
            yield {"query": name, "hits": hits}


def comparable(
    similarity: str, queries: Tensor, blocks: Iterator[tuple[int, Tensor]]
) -> tuple[Tensor, Iterator[tuple[int, Tensor]]]:
    """Vectors whose products are the similarities of the given ones."""
    if similarity == "dot":
        return queries, blocks
    return F.normalize(queries), ((first, F.normalize(block)) for first, block in blocks)


def named_texts(file: str, field: str | None) -> Iterator[tuple[str, str]]:
    """Yields id and text of each line; the id of a text without one is the number of its line.

    Raises:
        ConfigError: `field` is given, and the file is not JSON Lines.
        DataError: a line holds no text, or an id comes twice.
    """
    is_json = uncompressed(file).lower().endswith((".jsonl", ".json"))
    if field is not None and not is_json:
        raise ConfigError(f"--field {field} is for .jsonl files, and {shown(file)} is none")
    seen = set()
    for record in read_records((file,), lines):
        place = f"{shown(file)}:{record.line}"
        name = str(record.line)
        try:
            if record.problem:
                raise BadRecord(record.problem)
            if is_json:
                row = load_json(record.data)
                text = text_of(row, field or "text")
                if field is None and isinstance(row, dict) and row.get("title"):
                    text = f"{text_of(row, 'title')} {text}"
                if isinstance(row, dict) and "_id" in row:
                    name = str(value_at(row, "_id"))
            else:
                text = record.data.decode().strip()
        except (BadRecord, UnicodeDecodeError) as error:
            raise DataError(f"{place}: {error}. Correct or remove the line.") from error
        if not text.strip():
            raise DataError(f"{place} has an empty text. Remove the line.")
        if name in seen:
            raise DataError(f"{place} has the id {name!r}, as an earlier line has.")
        seen.add(name)
        yield name, text
    if not seen:
        raise DataError(f"{shown(file)} has no texts. Name another file.")
