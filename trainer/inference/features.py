"""`samestep features`: hidden states of texts, written as a NumPy array for other programs."""

from __future__ import annotations

import logging
import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.format.shards import Tokens
from samestep.errors import ConfigError, SamestepError, fix_of
from samestep.progress import Progress
from samestep.storage.local import temporary_name
from trainer.inference.hidden_states import TextEncoder, read_texts
from trainer.models import pooling
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.text_inputs import batches
from trainer.training.weights.loading import load_weights

logger = logging.getLogger(__name__)

Mix: TypeAlias = Literal["mean", "concat"]
Pool: TypeAlias = pooling.Pool | Literal["none"]
Shape: TypeAlias = tuple[int, ...]

_TEXTS_AT_A_TIME = 1024  # tokenized


def run(
    checkpoint: str,
    file: str,
    field: str | None,
    output: Path,
    *,
    layers: str,
    mix: Mix | None,
    pool: Pool | None,
    batch_tokens: int,
) -> None:
    """Writes the features of the texts in a file; see `samestep features --help`.

    Raises:
        ConfigError: an option has a value that the model or the output does not allow.
    """
    check_new(output)
    if pool == "none":
        check_new(_offsets_file(output))
    texts = read_texts(file, field, blank=True)
    weights = load_weights(checkpoint)
    own = None
    if pool is None and weights.step is None and isinstance(weights.folder, Path):
        own = Pooling.of(weights.folder)
    encoder = TextEncoder(weights)
    if own is not None:
        if layers != "-1" or mix is not None:
            raise ConfigError(
                f"{checkpoint} embeds texts by its last layer (modules.json), so other --layers "
                "and --mix need --pool; add it"
            )
        if own.pool == "splade":
            raise ConfigError(
                f"{checkpoint} embeds texts by SPLADE (modules.json), whose vectors are no hidden "
                "states. Add --pool, such as mean, or use samestep evaluate --retrieval."
            )
        pool = own.pool
        texts = map(own.with_default_prompt, texts)
        encoder.shorten(own.longest)
        encoder.check_folder(checkpoint)
        logger.info("embedding as modules.json of %s says: %s", checkpoint, own)
    numbers = chosen_layers(encoder, layers, 0)
    encoder.check_pool(pool or "mean")
    tokens = tokenize(encoder, texts)
    logger.info("reading %d texts on %s", len(tokens), encoder.device)
    features = Features(tuple(numbers), mix, pool or "mean", own is not None and own.normalize)
    shape = write(encoder, tokens, features, output, batch_tokens)
    logger.info("wrote %s: float32 %s", output, " x ".join(map(str, shape)))


def chosen_layers(encoder: TextEncoder, layers: str, first: int) -> list[int]:
    """The numbers in the option --layers; `all` begins with `first`.

    Raises:
        ConfigError: they are no numbers, or the model has no such layer.
    """
    if layers == "all":
        return [number for number in encoder.offered if number >= first]
    try:
        numbers = [int(number) for number in layers.split(",")]
    except ValueError as error:
        raise ConfigError(
            f"--layers must be all, or numbers as -1 or 9,10,11,12, not {layers!r}"
        ) from error
    return [encoder.layer(number, "--layers") for number in numbers]


@dataclass(frozen=True)
class Features:
    """How hidden states become features.

    Attributes:
        layers: their numbers, n of them.
        mix: how the vectors of n layers are combined, for each token, before pooling.
        pool: how the vectors of a text's tokens are combined.
        normalize: whether the result is scaled to length 1.
    """

    layers: tuple[int, ...]
    mix: Mix | None
    pool: Pool
    normalize: bool = False

    def shape(self, width: int) -> Shape:
        """Shape of a text's features, or with pool "none" of a token's, for width D."""
        count = len(self.layers)
        if self.mix == "mean" or count == 1:
            return (width,)
        return (count * width,) if self.mix == "concat" else (count, width)

    def of(self, states: Mapping[int, Tensor], real: Tensor) -> Tensor:
        """Computes the features of a batch.

        Args:
            states: hidden states [B, S, D] by layer.
            real: bool [B, S], False for padding.

        Returns:
            [B, ...]; with pool "none", [T, ...] for the T tokens, text by text.
        """
        if self.mix == "mean":
            # Summed in ascending order, so that the result does not depend on the order of
            # `layers`. A layer listed twice counts twice.
            counts = sorted(Counter(self.layers).items())
            weighted = [states[number] * (times / len(self.layers)) for number, times in counts]
            return self._pool(reduce(torch.add, weighted), real)
        # Pooled layer by layer, so that no tensor [B, n, S, D] of all layers is needed.
        pooled = {number: self._pool(hidden, real) for number, hidden in states.items()}
        stacked = torch.stack([pooled[number] for number in self.layers], 1)
        found = stacked.view(len(stacked), *self.shape(stacked.shape[2]))
        return F.normalize(found, dim=-1) if self.normalize else found

    def _pool(self, hidden: Tensor, real: Tensor) -> Tensor:
        """[B, S, D] -> [B, D]; with pool "none", [T, D]."""
        if self.pool == "none":
            return hidden[real]
        return pooling.pool(hidden, real, self.pool)


def write(
    encoder: TextEncoder,
    tokens: Sequence[Tokens],
    features: Features,
    output: Path,
    batch_tokens: int,
) -> Shape:
    """Writes the features of N texts, in their order.

    With pool "none", the features of text i are rows offsets[i] to offsets[i + 1], and
    FILE.offsets.npy, int64 [N + 1], is also written. For texts of 2 and 3 tokens: 0, 2, 5.

    Args:
        tokens: from `TextEncoder.prepare`.
        batch_tokens: positions of a batch, padding included.

    Returns:
        The shape of the array.

    Raises:
        SamestepError: a file cannot be written.
    """
    # With pool "none" a text has a row for each token, otherwise one row.
    lengths = np.array([len(text) for text in tokens])
    ragged = features.pool == "none"
    rows = lengths if ragged else np.ones_like(lengths)
    offsets = np.concatenate(([0], np.cumsum(rows)))
    shape = (int(offsets[-1]), *features.shape(encoder.width))
    with ExitStack() as stack:
        array = stack.enter_context(new_array(output, shape, np.float32))
        if ragged:
            file = new_array(_offsets_file(output), offsets.shape, np.int64)
            stack.enter_context(file)[:] = offsets
        progress = stack.enter_context(Progress("reading texts", len(tokens)))
        for numbers in batches(lengths, batch_tokens):
            real, states = encoder([tokens[number] for number in numbers], set(features.layers))
            found = features.of(states, real).cpu().numpy()
            # Example: texts 4 and 1 of 3 and 2 tokens have 5 rows, split after row 3.
            by_text = np.split(found, np.cumsum(rows[numbers])[:-1])
            for number, of_text in zip(numbers, by_text, strict=True):
                array[offsets[number] : offsets[number + 1]] = of_text
            progress.advance(len(numbers))
    return shape


def tokenize(encoder: TextEncoder, texts: Iterator[str]) -> list[Tokens]:
    """Tokenizes all texts; the tokens take less memory than the texts."""
    # All texts must be known before the first is computed: batches are sorted by length, and the
    # array is created with its final shape.
    tokens: list[Tokens] = []
    truncated = 0
    while read := list(islice(texts, _TEXTS_AT_A_TIME)):
        encoded = encoder.tokenizer.encode_batch(read)
        truncated += sum(len(text) > encoder.longest for text in encoded)
        tokens += map(encoder.prepare, encoded)
    encoder.warn_of_truncation(truncated, len(tokens))
    return tokens


def _offsets_file(output: Path) -> Path:
    return output.with_suffix(".offsets.npy")


def check_new(path: Path) -> None:
    if path.suffix != ".npy":
        raise ConfigError(f"--output {path} is a NumPy array; give it a name that ends in .npy")
    if path.exists():
        raise ConfigError(f"{path} already exists; name another file with --output, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--output {path}: there is no folder {path.parent}; make it, or name another file"
        )


@contextmanager
def new_array(path: Path, shape: Shape, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[np.generic]]:
    """Opens a memory-mapped array to fill; it appears under its name once it is complete.

    Raises:
        SamestepError: it cannot be written.
    """
    temporary = temporary_name(path)
    try:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        # The file is sparse so far, and a disk that fills up later would kill the process with
        # SIGBUS. macOS has no such call.
        if hasattr(os, "posix_fallocate"):
            with temporary.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
        yield array
        array.flush()
        temporary.replace(path)
    except OSError as error:
        size = math.prod(shape) * np.dtype(dtype).itemsize / 2**30
        raise SamestepError(
            f"cannot write {path} ({size:.3g} GiB): {error.strerror}; "
            f"{fix_of(error, 'give access')}, or name another file with --output"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
