"""`samestep vectors`: from a dataset to a folder of word vectors."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from data_pipeline.reading.dataset import Dataset
from samestep.errors import ConfigError, DataError
from samestep.progress import Progress
from trainer.vectors import cooccurrence, glove, ppmi, word2vec
from trainer.vectors.corpus import Ids, Splitter, Words, count_words, write_numbers
from trainer.vectors.folder import WordVectors
from trainer.vectors.settings import Settings
from trainer.vectors.work import State, unfinished

logger = logging.getLogger(__name__)


def run(
    location: str, settings: Settings, output: Path, *, workers: int, memory: int, text: bool
) -> None:
    """Trains the vectors of a dataset, and writes them to a new folder.

    A command that was stopped continues from its last minute; counting begins anew from the
    beginning if they were not complete.

    Args:
        location: folder or address of the dataset.
        workers: threads that read it.
        memory: about the bytes that counting and shuffling pairs take.
        text: whether to write the format of word2vec as well.

    Raises:
        ConfigError: a setting and the dataset do not go together, or the output exists.
        DataError: the dataset cannot be read, or has too little text.
    """
    dataset = Dataset.open(location)
    made_of = {**asdict(settings), "dataset": dataset.manifest.digest}
    with unfinished(output, made_of) as folder, _one_thread():
        words = _numbered(dataset, settings, folder, workers)
        content = np.memmap(folder / "text", "<i4", mode="r")
        logger.info(
            "%s of the dataset's words are %s different ones",
            *(f"{int(words.counts.sum()):,}", f"{len(words.names):,}"),
        )
        if settings.method in ("skipgram", "cbow"):
            vectors = _word2vec(content, words, settings, folder)
        else:
            vectors = _from_counts(content, words, settings, folder, memory)
        description = {
            "settings": asdict(settings),
            "words": len(words.names),
            "occurrences": int(words.counts.sum()),
            "dataset": dataset.manifest.digest,
            "tokenizer": dataset.tokenizer.fingerprint,
        }
        tokens = None if words.tokens is None else torch.from_numpy(words.tokens)
        made = WordVectors(words.names, vectors, tokens, description, dataset.tokenizer)
        # An earlier command, with other options for the output, may have been killed here.
        shutil.rmtree(folder / "result", ignore_errors=True)
        made.save(folder / "result", text)
    logger.info("wrote %s", output)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Computes with one thread: batches are too small for more, and sums keep one order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _numbered(dataset: Dataset, settings: Settings, folder: Path, workers: int) -> Words:
    """Writes the text as word numbers, if that was not done before.

    Raises:
        ConfigError, DataError: see `run`.
    """
    vocabulary = folder / "vocabulary.json"
    if vocabulary.exists():
        return Words.load(vocabulary)
    splitter = Splitter(dataset.tokenizer, settings.units)
    words, encoding = count_words(dataset, splitter, settings.units, settings.min_count, workers)
    if settings.method == "ppmi" and settings.dimensions > len(words.names):
        raise ConfigError(
            f"--dimensions is {settings.dimensions}, and the matrix of {len(words.names)} words "
            "has no more singular vectors than words. Lower it, or --min-count."
        )
    write_numbers(dataset, splitter, encoding, folder / "text", workers)
    # Comes last, and so shows that the text is complete.
    words.save(vocabulary)
    return words


def _word2vec(content: Ids, words: Words, settings: Settings, folder: Path) -> Tensor:
    state = State(folder / "state.safetensors")
    done = state.seen(len(content), word2vec.BLOCK)
    with _training(settings.epochs * len(content), done) as advance:
        return word2vec.train(content, words, settings, state, advance)


def _from_counts(
    content: Ids, words: Words, settings: Settings, folder: Path, memory: int
) -> Tensor:
    is_glove = settings.method == "glove"
    weights = (cooccurrence.harmonic if is_glove else cooccurrence.linear)(settings.window)
    if (folder / "all.keys").exists():
        counts = cooccurrence.Cooccurrences.open(folder, len(words.names), weights.one)
    else:
        counts = cooccurrence.count(content, weights, len(words.names), folder, memory)
    size = len(counts.pairs.keys)
    if not size:
        raise DataError(
            "no two words of the dataset are near each other in one document. Lower --min-count, "
            "or build the dataset from longer documents."
        )
    logger.info("%s pairs of words are near each other", f"{size:,}")
    if not is_glove:
        return ppmi.train(counts, settings.dimensions, settings.seed)
    shuffled = folder / "shuffled"
    if not shuffled.exists():
        glove.shuffle(counts, shuffled, settings.seed, memory)
    state = State(folder / "state.safetensors")
    with _training(settings.epochs * size, state.seen(size, glove.BLOCK)) as advance:
        return glove.train(shuffled, len(words.names), settings, state, advance)


@contextmanager
def _training(total: int, done: int) -> Iterator[Callable[[int, str], None]]:
    """Shows the progress of a training over `total` words or pairs, of which some are done."""
    with Progress("training vectors", total, done=done) as progress:

        def advance(count: int, note: str) -> None:
            nonlocal done
            done += count
            progress.update(done, note)

        yield advance
