"""Hidden states of texts, layer by layer, for `samestep features` and `samestep neighbors`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from data_pipeline.format.shards import Tokens
from data_pipeline.sources import BadRecord, Record, Source
from data_pipeline.sources.files import read_records, uncompressed
from data_pipeline.sources.kinds.jsonl import JsonLines, lines
from samestep.errors import ConfigError, DataError
from samestep.storage import shown
from trainer.accelerators.detect import for_any_shapes
from trainer.models import Outputs
from trainer.models.text_inputs import padded_inputs, prepare, special_tokens
from trainer.training.weights.loading import Weights, load_weights

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Lines(Source):
    """Reads lines; `blank` ones are empty texts, or skipped."""

    blank: bool

    def records(self) -> Iterator[Record]:
        numbered = functools.partial(enumerate, start=1)
        return read_records(self.files, numbered if self.blank else lines)


def read_texts(
    path: str, field: str | None = None, *, default: str = "text", blank: bool = False
) -> Iterator[str]:
    """Reads the texts of a file (plain or compressed) or an address, one a line.

    The first text is read at once, so that a wrong name is found before a model is loaded.

    Args:
        field: key of the text in JSON Lines; None is `default`.
        blank: a blank line is an error instead of being skipped. JSON Lines always skip it.

    Raises:
        ConfigError: `field` is given, and the file is not JSON Lines.
        DataError: the file cannot be read or is empty, or a line holds no text.
    """
    source: Source = _Lines((path,), blank)
    if uncompressed(path).lower().endswith((".jsonl", ".json")):
        source = JsonLines((path,), field or default)
    elif field is not None:
        raise ConfigError(
            f"--field {field} is for .jsonl files, and {shown(path)} is none; leave --field out"
        )
    # A generator would report a missing file only when its first text is asked for.
    texts = _parsed(source)
    return chain([next(texts)], texts)


def _parsed(source: Source) -> Iterator[str]:
    for record in source.records():
        try:
            yield source.parse(record).rstrip("\r\n")
        except BadRecord as error:
            place = f"{shown(source.files[0])}:{record.line}"
            raise DataError(f"{place}: {error}; correct or remove the line") from error


class TextEncoder:
    """A trained model that reads texts as in training, on the best device available.

    An encoder-decoder model reads them with its encoder.

    Attributes:
        model: in eval mode, on the device.
        layers: L, the number of layers.
        heads: H, of each layer's attention.
        width: D, of the hidden states.
        vocab_size: V.
        device: description of the device.
        placed: the device.
        sees_all: whether the first position attends to the whole text.
        first: position of a text's first token, after the special tokens.
        last: number of special tokens after a text.
        longest: maximum number of tokens of a text.

    Args:
        checkpoint: a path for `trainer.training.weights.loading.load_weights`, or its result.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
    """

    def __init__(self, checkpoint: str | Weights) -> None:
        # Only hidden states are needed, so a fine-tuned model will do.
        weights = load_weights(checkpoint) if isinstance(checkpoint, str) else checkpoint
        config = weights.config
        self.tokenizer = weights.load_tokenizer()
        accelerator = for_any_shapes()
        self.placed, self.device = accelerator.device, accelerator.description
        model = weights.model(frozenset({f"layer.{config.layers}"}))
        self.model = model.to(self.placed)
        self._is_prefix = config.prefix_lm
        self.sees_all = self._is_prefix or not config.causal
        self.layers, self.heads, self.width = config.layers, config.heads, config.width
        self.vocab_size = config.vocab_size
        self._before, self._after = special_tokens(config, self.tokenizer.vocabulary)
        self.first, self.last = len(self._before), len(self._after)
        self.longest = model.max_sequence_length - len(self._before) - len(self._after)

    @property
    def table(self) -> Tensor:
        """The token embeddings, fp32 [V, D] on the CPU, without the padding of the vocabulary."""
        return self.model.token_table()[: self.tokenizer.vocabulary.size].float().cpu()

    @property
    def offered(self) -> list[int]:
        """The layers with hidden states of width D; in some recurrent models, not all of them."""
        every = range(self.layers + 1)
        return [number for number in every if f"layer.{number}" in self.model.offers]

    def layer(self, number: int, option: str) -> int:
        """Resolves a negative layer number: -1 is the last layer.

        Raises:
            ConfigError: the model has no such layer, or offers no states of it; the error names
                `option`.
        """
        if not -self.layers - 1 <= number <= self.layers:
            raise ConfigError(
                f"{option} is {number}, and the model has layers 1 to {self.layers}; use one of "
                f"these, -{self.layers} to -1 from the last one, or 0 for the embeddings"
            )
        found = number % (self.layers + 1)
        if found not in self.offered:
            raise ConfigError(
                f"{option} is {number}, and the model offers no states of that layer; use one of "
                f"{', '.join(map(str, self.offered))}"
            )
        return found

    def shorten(self, length: int | None) -> None:
        """Truncates texts to a number of tokens with their special tokens; None changes nothing.

        Raises:
            ConfigError: the special tokens alone are as many.
        """
        special = self.first + self.last
        if length is not None and length <= special:
            raise ConfigError(
                f"texts of {length} tokens have no space beside the {special} special ones. Set "
                "--max-length, or max_seq_length of the model's folder, higher."
            )
        if length is not None:
            self.longest = min(self.longest, length - special)

    def check_pool(self, pool: str) -> None:
        """Rejects a pooling of what the model does not compute.

        Raises:
            ConfigError: the first token of a causal model has seen nothing but itself, or SPLADE
                lacks a head that predicts masked tokens.
        """
        if pool == "splade" and "tokens" not in self.model.offers:
            raise ConfigError(
                "SPLADE needs a head that predicts masked tokens, and this model has none. Use a "
                "run of objective splade, or a folder of SparseEncoder."
            )
        if pool == "first" and not self.sees_all:
            raise ConfigError(
                "--pool first needs a model whose first token attends to the whole text, and this "
                "model reads from left to right; use --pool last or mean"
            )

    def check_folder(self, checkpoint: str) -> None:
        """Rejects a folder of sentence-transformers with a model that reads from left to right.

        Raises:
            ConfigError: with what to do.
        """
        if not self.sees_all:
            # Which special tokens it puts around a text differs from model to model.
            raise ConfigError(
                f"{checkpoint} is a folder of sentence-transformers with a model that reads from "
                "left to right, and its special tokens would be others. Remove modules.json to use "
                "samestep's, and name the pooling with --pool."
            )

    def prepare(self, tokens: Tokens) -> Tokens:
        """Adds the special tokens; a text that is too long for the model is truncated."""
        return prepare(tokens, self._before, self._after, self.longest)

    def warn_of_truncation(self, truncated: int, texts: int) -> None:
        """Logs how many of the texts were truncated, if any."""
        if truncated:
            logger.warning(
                "%d of %d texts are longer than the %d tokens that the model reads; "
                "they are truncated",
                *(truncated, texts, self.longest),
            )

    @torch.no_grad()
    def __call__(
        self, texts: Sequence[Tokens], layers: Collection[int]
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Computes the hidden states of a batch.

        Args:
            texts: from `prepare`.
            layers: numbered as in transformers: 0 is the input of the first layer, and the last
                layer's states include the final norm, where the model has one.

        Returns:
            Which positions are not padding, bool [B, S]; and by layer, fp32 [B, S, D].
        """
        # Only the layers that were requested are kept; all of them may not fit into memory.
        names = {f"layer.{number}": number for number in layers}
        real, found = self._run(texts, frozenset(names))
        return real, {number: found[name] for name, number in names.items()}

    @torch.no_grad()
    def output(self, texts: Sequence[Tokens], name: str) -> tuple[Tensor, Tensor]:
        """Computes an output: bool [B, S], False for padding, and [B, S, D] or logits [B, S, V].

        Args:
            texts: from `prepare`.
            name: see `trainer.models.pooling.output_of`.
        """
        real, found = self._run(texts, frozenset({name}))
        return real, found[name]

    @torch.no_grad()
    def attention(self, texts: Sequence[Tokens], layers: Sequence[int]) -> Tensor:
        """Computes the attention of a batch: fp32 [B, layers, H, S, S], 0 for padding.

        With a prompt or prefix, rows sum to less than 1: the rest is attention to it.

        Args:
            texts: from `prepare`.
            layers: numbered from 1.

        Raises:
            ConfigError: the model does not offer its attention.
        """
        names = [f"attention.{number}" for number in layers]
        if missing := sorted(set(names) - self.model.offers):
            raise ConfigError(
                f"the model does not offer {missing[0]}; use an encoder or a decoder, as BERT or "
                "GPT-2"
            )
        real, found = self._run(texts, frozenset(names))
        pairs = real[:, None, :, None] & real[:, None, None, :]
        # The text is the last S queries and keys; a prompt adds both before it, a prefix keys.
        length = real.shape[1]
        shares = [found[name].softmax(-1)[..., -length:, -length:] for name in names]
        return torch.stack([each * pairs for each in shares], 1)

    def _run(self, texts: Sequence[Tokens], outputs: Outputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Which positions are not padding, bool [B, S], and the outputs of the model."""
        # Positions after a text are padding of token 0, which `segments` hides from attention.
        inputs = padded_inputs(texts, self.placed)
        assert inputs.segments is not None
        real = inputs.segments > 0
        if self._is_prefix:
            inputs = replace(inputs, prefix=real)
        found: dict[str, Tensor] = self.model(inputs, outputs)
        return real, found
