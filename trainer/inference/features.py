"""`samestep features`: what a trained model makes of texts, as an array that other programs learn from."""

from __future__ import annotations

import argparse
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.command import Commands, add_command, progress_bar
from trainer.errors import EXIT_DONE, ConfigError, SamestepError

if TYPE_CHECKING:
    from torch import Tensor

    from data_pipeline.format.shards import Tokens
    from trainer.inference.hidden_states import TextEncoder

logger = logging.getLogger(__name__)

Mix: TypeAlias = Literal["mean", "concat"]
Pool: TypeAlias = Literal["mean", "first", "max", "none"]
Shape: TypeAlias = tuple[int, ...]

_READ = 1024  # texts that are tokenized at a time


def register(commands: Commands) -> None:
    """Adds `features` to the `samestep` command."""
    parser = add_command(
        commands,
        "features",
        _run,
        "write a frozen model's hidden states of texts as an array",
        "Rows are in the order of the texts. Special tokens that the model read around a text count as its tokens.\n"
        "Several layers without --mix make a dimension of their own: texts x layers x width.\n\n"
        "examples:\n"
        "  samestep features runs/bert_base reviews.txt --output reviews.npy\n"
        "  samestep features hf://google-bert/bert-base-uncased reviews.jsonl.zst --field review \\\n"
        "    --layers=-4,-3,-2,-1 --mix concat --pool none --output tokens.npy",
        "Write a frozen model's hidden states of texts as an array, float32 in NumPy's format.",
    )
    parser.add_argument(
        "checkpoint",
        metavar="CKPT",
        help="a run or a step, its folder or address; a Hugging Face folder or hf://NAME",
    )
    parser.add_argument(
        "file", metavar="FILE", help="texts, one a line, or .jsonl; also .gz or .zst"
    )
    parser.add_argument("--output", required=True, metavar="FILE.npy", help="a new file")
    parser.add_argument(
        "--field", metavar="NAME", help="of .jsonl: the key of the text (default: text)"
    )
    parser.add_argument(
        "--layers",
        default="-1",
        metavar="N[,N]",
        help="from 1, or -1 and so on from the last; 0 is the embeddings; or all, 0 included (default: -1). Write "
        "--layers=-2,-1 where a list begins with a minus",
    )
    parser.add_argument(
        "--mix", choices=("mean", "concat"), help="make one vector of those of several layers"
    )
    parser.add_argument(
        "--pool",
        choices=("mean", "first", "max", "none"),
        default="mean",
        help="make one vector of a text's tokens: their mean, the first one's ([CLS]), the maximum; none: keep each "
        "token's, all texts end to end, and write where each begins to FILE.offsets.npy (default: mean)",
    )
    parser.add_argument(
        "--batch-tokens",
        type=int,
        default=8192,
        metavar="N",
        help="computed at a time (default: 8192)",
    )


def _run(args: argparse.Namespace) -> int:
    from trainer.inference.hidden_states import TextEncoder, read_texts

    output = Path(args.output)
    for path in (output, _offsets_file(output)) if args.pool == "none" else (output,):
        _check_new(path)
    if args.batch_tokens < 1:
        raise ConfigError(f"--batch-tokens must be at least 1, not {args.batch_tokens}")
    numbers = _numbers(args.layers)
    texts = read_texts(args.file, args.field, blank=True)
    encoder = TextEncoder(args.checkpoint)
    layers = (
        range(encoder.layers + 1)
        if numbers is None
        else [encoder.layer(n, "--layers") for n in numbers]
    )
    if args.pool == "first" and not encoder.sees_all:
        raise ConfigError(
            "--pool first takes the features of a text's first token, and this model reads from left to right, so that "
            "the token has seen nothing of the text; use --pool mean"
        )
    tokens = _tokenized(encoder, texts)
    logger.info("reading %d texts on %s", len(tokens), encoder.device)
    shape = write(
        encoder, tokens, Features(tuple(layers), args.mix, args.pool), output, args.batch_tokens
    )
    logger.info("wrote %s: float32 %s", output, " x ".join(map(str, shape)))
    return EXIT_DONE


@dataclass(frozen=True)
class Features:
    """What becomes of the hidden states of texts.

    Attributes:
        layers: n numbers.
        mix: what makes a vector of n; of each token, before tokens are pooled.
        pool: what makes a vector of those of a text's tokens.
    """

    layers: tuple[int, ...]
    mix: Mix | None
    pool: Pool

    def shape(self, width: int) -> Shape:
        """Of a text's features, or with pool none of a token's; width: D, of hidden states."""
        count = len(self.layers)
        if self.mix == "mean" or count == 1:
            return (width,)
        return (count * width,) if self.mix == "concat" else (count, width)

    def of(self, states: Mapping[int, Tensor], real: Tensor) -> Tensor:
        """The features of a batch.

        Args:
            states: hidden states [B, S, D], by the number of their layer.
            real: bool [B, S], False for padding.

        Returns:
            [B, ...], or with pool none, [T, ...] for the T real cells, text by text.
        """
        import torch

        if self.mix == "mean":
            # In ascending order, so that the sum does not depend on how layers were listed.
            weights = {
                number: self.layers.count(number) / len(self.layers) for number in sorted(states)
            }
            weighted = (states[number] * weight for number, weight in weights.items())
            return self._pooled(reduce(torch.add, weighted), real)
        found = {number: self._pooled(hidden, real) for number, hidden in states.items()}
        stacked = torch.stack([found[number] for number in self.layers], 1)
        return stacked.view(len(stacked), *self.shape(stacked.shape[2]))

    def _pooled(self, hidden: Tensor, real: Tensor) -> Tensor:
        """[B, S, D] -> [B, D], or [T, D]."""
        if self.pool == "none":
            return hidden[real]
        if self.pool == "first":
            return hidden[:, 0]
        cells = real[..., None]
        if self.pool == "max":
            return hidden.masked_fill(~cells, -math.inf).amax(1)
        return (hidden * cells).sum(1) / cells.sum(1)


def write(
    encoder: TextEncoder, tokens: Sequence[Tokens], features: Features, output: Path, cells: int
) -> Shape:
    """Writes the features of texts, each as `TextEncoder.prepare` gives it, in their order.

    With pool none, the features of text i are rows offsets[i] to offsets[i + 1], and FILE.offsets.npy, int64 [N + 1],
    is written, too.

    Args:
        encoder: the model.
        tokens: of N texts.
        features: what is wanted.
        output: the file.
        cells: of a batch.

    Returns:
        The shape of the array.

    Raises:
        SamestepError: a file cannot be written.
    """
    from trainer.inference.hidden_states import batches

    lengths = np.array([len(text) for text in tokens])
    ragged = features.pool == "none"
    counts = lengths if ragged else np.ones_like(lengths)
    offsets = np.concatenate(([0], np.cumsum(counts)))
    shape = (int(offsets[-1]), *features.shape(encoder.width))
    with ExitStack() as stack:
        array = stack.enter_context(_new_array(output, shape, np.float32))
        if ragged:
            stack.enter_context(_new_array(_offsets_file(output), offsets.shape, np.int64))[:] = (
                offsets
            )
        bar = stack.enter_context(progress_bar(len(tokens)))
        for numbers in batches(lengths, cells):
            real, states = encoder([tokens[number] for number in numbers], set(features.layers))
            found = features.of(states, real).cpu().numpy()
            for number, part in zip(
                numbers, np.split(found, np.cumsum(counts[numbers])[:-1]), strict=True
            ):
                array[offsets[number] : offsets[number + 1]] = part
            bar.advance(bar.task_ids[0], len(numbers))
    return shape


def _tokenized(encoder: TextEncoder, texts: Iterator[str]) -> list[Tokens]:
    """All texts as the model reads them; tokens take less memory than the texts."""
    tokens: list[Tokens] = []
    cut = 0
    while read := list(islice(texts, _READ)):
        encoded = encoder.tokenizer.encode_batch(read)
        cut += sum(len(text) > encoder.longest for text in encoded)
        tokens += map(encoder.prepare, encoded)
    encoder.warn_of_cut(cut, len(tokens))
    return tokens


def _numbers(text: str) -> list[int] | None:
    """The numbers of layers; None: all."""
    if text == "all":
        return None
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise ConfigError(
            f"--layers must be all, or numbers as -1 or 9,10,11,12, not {text!r}"
        ) from None


def _offsets_file(output: Path) -> Path:
    return output.with_suffix(".offsets.npy")


def _check_new(path: Path) -> None:
    if path.suffix != ".npy":
        raise ConfigError(
            f"--output {path} is to be an array of NumPy; give it a name that ends in .npy"
        )
    if path.exists():
        raise ConfigError(f"{path} already exists; name another file with --output, or remove it")
    if not path.parent.is_dir():
        raise ConfigError(
            f"--output {path}: there is no folder {path.parent}; make it, or name another file"
        )


@contextmanager
def _new_array(path: Path, shape: Shape, dtype: npt.DTypeLike) -> Iterator[npt.NDArray[Any]]:
    """An array to be filled on the disk; it appears under its name once it is whole.

    Raises:
        SamestepError: it cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        array = np.lib.format.open_memmap(temporary, mode="w+", dtype=dtype, shape=shape)
        if hasattr(
            os, "posix_fallocate"
        ):  # not on macOS. A disk that is full later would kill the process
            with temporary.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, temporary.stat().st_size)
        yield array
        array.flush()
        temporary.replace(path)
    except OSError as error:
        size = math.prod(shape) * np.dtype(dtype).itemsize / 2**30
        raise SamestepError(
            f"cannot write {path}: {error.strerror}; it takes {size:.3g} GiB: free some space or give access, or name "
            "another file with --output"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)
