"""`samestep embed` and `samestep search`."""

from __future__ import annotations

import hashlib
import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from data_pipeline.sources import BadRecord
from data_pipeline.sources.files import read_records, uncompressed
from data_pipeline.sources.kinds.jsonl import lines, load_json, text_of
from samestep.errors import ConfigError, DataError
from samestep.progress import Progress
from samestep.storage import shown
from samestep.stored_json import JsonError, checked
from trainer.inference.retrieval.jobs import alone, processes
from trainer.inference.retrieval.sentences import Given, SentenceEncoder
from trainer.inference.retrieval.vectors import Number, Vectors
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.training.retrieval import search as exact

logger = logging.getLogger(__name__)

_QUERIES_AT_A_TIME = 1024


@dataclass(frozen=True)
class Output:
    """Where and how vectors are stored.

    Attributes:
        part: number of texts of a file, which an interruption may lose.
    """

    folder: Path
    number: Number
    part: int


def embed(
    checkpoint: str,
    file: str,
    field: str | None,
    output: Output,
    *,
    role: str,
    given: Given,
    batch_tokens: int,
) -> None:
    """Writes the vectors of the texts in a file; goes on where an earlier call was stopped.

    Part i is written by process i modulo their number, so vectors do not depend on it.

    Args:
        role: of the texts, by which a prompt is chosen: query or document.
        given: see `SentenceEncoder`.

    Raises:
        ConfigError: the folder was begun with something else.
        DataError: a line holds no text.
    """
    with processes() as world:
        names: list[str] = []
        own_texts: dict[int, list[str]] = defaultdict(list)
        digest = hashlib.sha256()
        for name, text in named_texts(file, field):
            # With 2 processes and parts of 100, process 1 embeds the texts 100 to 199, 300 to 399.
            index = len(names) // output.part
            if index % world.size == world.rank:
                own_texts[index].append(text)
            names.append(name)
            digest.update(json.dumps([name, text]).encode())
        encoder = SentenceEncoder(checkpoint, given)
        vectors = Vectors.begin(
            output.folder,
            names,
            part=output.part,
            width=encoder.width,
            number=output.number,
            similarity=encoder.pooling.similarity,
            sparse=encoder.is_sparse,
            made_of=made_of(encoder, role, digest.hexdigest()),
        )
        logger.info("embedding %d texts on %s", len(names), encoder.device)
        with alone(output.folder, world):
            write_missing(vectors, own_texts, encoder, role, batch_tokens)
        shape = (vectors.texts, vectors.width)
        logger.info("wrote %s: %s %d x %d", output.folder, output.number, *shape)


def made_of(encoder: SentenceEncoder, role: str, texts: str) -> dict[str, object]:
    """What vectors depend on.

    Args:
        texts: their digest.
    """
    return {
        "model": encoder.identity,
        "pooling": asdict(encoder.pooling),
        "role": role,
        "texts": texts,
    }


def write_missing(
    vectors: Vectors,
    texts: Mapping[int, Sequence[str]],
    encoder: SentenceEncoder,
    role: str,
    batch_tokens: int,
) -> None:
    """Embeds the parts that an earlier call, stopped between two of them, has not written.

    Args:
        texts: of each part that this process writes.
        role: of the texts: query or document.
    """
    missing = [index for index in texts if not vectors.has(index)]
    if there := len(texts) - len(missing):
        logger.info("%d of %d parts are there already", there, len(texts))
    with Progress("embedding", len(missing)) as progress:
        for index in missing:
            prompted = encoder.for_role("query" if role == "query" else "document", texts[index])
            vectors.write(index, encoder.stored(prompted, batch_tokens))
            progress.advance(1)
    encoder.warn_of_truncation(sum(len(texts[index]) for index in missing))


def search(
    checkpoint: str,
    folder: Path,
    queries: str,
    field: str | None,
    k: int,
    given: Given,
) -> Iterator[dict[str, object]]:
    """Yields each query with its `k` nearest texts in a folder of `embed`, from the nearest on.

    Queries are pooled as the texts were.

    Raises:
        ConfigError: the vectors are another model's.
        DataError: the folder or the file of queries is damaged.
    """
    vectors = Vectors.open(folder)
    try:
        stored = checked(vectors.made_of.get("pooling"), Pooling)
    except JsonError as error:
        raise DataError(
            f"{folder} does not say how its texts were pooled: {error}. Copy the folder again."
        ) from error
    named = list(named_texts(queries, field))
    encoder = SentenceEncoder(checkpoint, given, stored)
    if (encoder.identity, encoder.width) != (vectors.made_of.get("model"), vectors.width):
        raise ConfigError(
            f"{folder} was embedded by another model than {checkpoint}. Name that model, or embed "
            "the texts again."
        )
    for first in range(0, len(named), _QUERIES_AT_A_TIME):
        group = named[first : first + _QUERIES_AT_A_TIME]
        texts = encoder.for_role("query", [text for _, text in group])
        found = encoder(texts).to(encoder.placed)
        # The blocks are read again for each group: vectors need not fit into memory.
        pairs = exact.comparable(vectors.similarity, found, vectors.blocks())
        products, rows = exact.top(*pairs, k)
        for (name, _), scores, places in zip(group, products, rows, strict=True):
            # Six digits: the last ones of fp32 differ between devices.
            hits = [
                {"id": vectors.names[place], "score": round(float(score), 6)}
                for score, place in zip(scores, places, strict=True)
            ]
            yield {"query": name, "hits": hits}


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
                    # Judgments are text, so an id 7 becomes "7".
                    if not isinstance(row["_id"], str | int):
                        raise BadRecord("field '_id' is neither text nor a whole number")
                    name = str(row["_id"])
            else:
                text = record.data.decode().strip()
            f"{name}{text}".encode()  # JSON can spell half of a surrogate pair
        except (BadRecord, UnicodeError) as error:
            raise DataError(f"{place}: {error}. Correct or remove the line.") from error
        if not text.strip():
            raise DataError(f"{place} has an empty text. Remove the line.")
        if name in seen:
            raise DataError(
                f"{place} has the id {name!r}, as an earlier line has. Give each its own."
            )
        seen.add(name)
        yield name, text
    if not seen:
        raise DataError(f"{shown(file)} has no texts. Name another file.")
