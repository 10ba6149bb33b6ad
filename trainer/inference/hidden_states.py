"""Hidden states of texts in the layers of a trained model: what `samestep features` and `neighbours` look at."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from data_pipeline.format.shards import Tokens
from data_pipeline.sources import BadRecord, Record, Source
from data_pipeline.sources.files import read_records
from data_pipeline.sources.jsonl import JsonLines, lines
from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.accelerators.detect import for_any_shapes
from trainer.errors import ConfigError, DataError
from trainer.examples import Vocabulary
from trainer.models import Inputs, ModelConfig
from trainer.storage import shown
from trainer.training.weights import load_weights

logger = logging.getLogger(__name__)

Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True)
class _Lines(Source):
    blank: bool

    def records(self) -> Iterator[Record]:
        return read_records(
            self.files, (lambda file: enumerate(file, start=1)) if self.blank else lines
        )


def read_texts(path: str, field: str | None = None, *, blank: bool = False) -> Iterator[str]:
    """The texts of a file (plain, `.gz` or `.zst`; or its address): its lines or, of JSON Lines, a field of each.

    Args:
        path: the file; its first text is read at once, so that a wrong name is found before a model is loaded.
        field: of JSON Lines; None is "text".
        blank: whether a blank line is an error; else it is passed over, as it always is in JSON Lines.

    Raises:
        ConfigError: `field` is given, and the file has none.
        DataError: it cannot be read, is empty, or a line holds no text.
    """
    is_json = path.removesuffix(".gz").removesuffix(".zst").endswith(".jsonl")
    if field is not None and not is_json:
        raise ConfigError(
            f"--field {field} is for .jsonl files, and {shown(path)} is none; leave --field out"
        )
    texts = _parsed(JsonLines((path,), field or "text") if is_json else _Lines((path,), blank))
    return chain([next(texts)], texts)


def _parsed(source: Source) -> Iterator[str]:
    hint = ", or name another field with --field" if isinstance(source, JsonLines) else ""
    for record in source.records():
        try:
            text = source.parse(record)
        except BadRecord as error:
            place = f"{shown(source.files[0])}:{record.line}"
            raise DataError(f"{place}: {error}; correct or remove the line{hint}") from None
        yield text.rstrip("\r\n")


def batches(lengths: Int64, cells: int) -> Iterator[Int64]:
    """Cuts texts into batches, the longest first, so that too little memory shows at once, and little is padding.

    Args:
        lengths: int64 [N].
        cells: of a batch, padding included; a longer text is a batch by itself.

    Yields:
        The numbers of a batch's texts.
    """
    order = np.argsort(-lengths, kind="stable")
    first = 0
    while first < len(order):
        count = max(1, cells // int(lengths[order[first]]))
        yield order[first : first + count]
        first += count


def _specials(config: ModelConfig, vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """The tokens before and after each text in training, as far as the tokenizer has them."""
    cls, end = vocabulary.cls, vocabulary.end
    sides: tuple[int | None, int | None]
    if config.reads_sources:
        sides = None, end
    elif config.causal:
        sides = end if cls is None else cls, None
    else:
        sides = cls, vocabulary.sep
    before, after = ([] if token is None else [token] for token in sides)
    return before, after


class TextEncoder:
    """A trained model that reads texts as it did in training, on the best device that there is.

    An encoder-decoder reads them with its encoder.

    Attributes:
        tokenizer: of the model.
        layers: L, how many there are.
        width: D, of the hidden states.
        device: in words.
        sees_all: whether the first cell has seen the whole text, too.
        first: the cell of a text's first token.
        longest: the most tokens of a text that fit.

    Args:
        checkpoint: as of `trainer.training.weights.load_weights`.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """

    def __init__(self, checkpoint: str) -> None:
        weights = load_weights(checkpoint)
        config = weights.config
        with weights.tokenizer_files() as folder:
            self.tokenizer = Tokenizer.load(folder)
        accelerator = for_any_shapes()
        self._device, self.device = accelerator.device, accelerator.description
        model = weights.model(frozenset(f"layer.{number}" for number in range(config.layers + 1)))
        self._model = model.to(self._device)
        self._is_prefix = config.prefix_lm
        self.sees_all = self._is_prefix or not config.causal
        self.layers, self.width = config.layers, config.width
        self._before, self._after = _specials(config, self.tokenizer.vocabulary)
        self.first = len(self._before)
        self.longest = model.max_sequence_length - len(self._before) - len(self._after)

    @property
    def table(self) -> Tensor:
        """The token embeddings, fp32 [V, D] on the CPU, without rows that no token has."""
        rows = self._model.token_embeddings[: self.tokenizer.vocabulary.size]
        return rows.detach().float().cpu()

    def layer(self, number: int, option: str) -> int:
        """The number of a layer, from 0, where -1 is the last one, and so on.

        Raises:
            ConfigError: there is none.
        """
        if not -self.layers - 1 <= number <= self.layers:
            raise ConfigError(
                f"{option} {number}: there is no such layer; the model has 1 to {self.layers}, or -{self.layers} to -1 "
                "from the last one, and 0, the embeddings"
            )
        return number % (self.layers + 1)

    def prepare(self, tokens: Tokens) -> Tokens:
        """Puts a text between special tokens; one that is too long for the model loses its end."""
        before, after = (np.array(side, tokens.dtype) for side in (self._before, self._after))
        return np.concatenate((before, tokens[: self.longest], after))

    def warn_of_cut(self, cut: int, texts: int) -> None:
        """Says how many of the texts that were read were too long, if any."""
        if cut:
            logger.warning(
                "%d of %d texts are longer than the %d tokens that the model reads of a text, and lose their end",
                *(cut, texts, self.longest),
            )

    @torch.no_grad()
    def __call__(
        self, texts: Sequence[Tokens], layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Computes a batch.

        Args:
            texts: from `prepare`.
            layers: numbers of the layers whose hidden states are wanted.

        Returns:
            Which positions are not padding, bool [B, S]; and the hidden states after each layer, by
            its number: fp32 [B, S, D]. Numbers are those of transformers: 0 is what the first layer
            reads, and the last layer's states include the final norm where the model has one.
        """
        rows = [torch.from_numpy(text.astype(np.int64)) for text in texts]  # torch pads no uint16
        tokens = pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows])
        real = (torch.arange(tokens.shape[1]) < lengths[:, None]).to(self._device)
        inputs = Inputs(
            tokens=tokens.to(self._device),
            segments=real.int(),
            positions=torch.arange(tokens.shape[1], device=self._device).expand_as(tokens),
            prefix=real if self._is_prefix else None,
        )
        names = {f"layer.{number}": number for number in layers}
        found = self._model(inputs, frozenset(names))
        return real, {number: found[name] for name, number in names.items()}
