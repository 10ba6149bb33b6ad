"""Generation: causal models continue texts, encoder-decoders generate them from sources."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from trainer.errors import ConfigError
from trainer.examples import Vocabulary
from trainer.generation.config import Config
from trainer.generation.search import beam_search, one_by_one
from trainer.hashing import combine, name_key, uniform
from trainer.models import Generates, Inputs
from trainer.models.cache import Cache

__all__ = ["Config", "Generator"]

logger = logging.getLogger(__name__)

_SAMPLE = name_key("generation.sample")


class Generator:
    """Generates a text for each source.

    The texts are those that `transformers` generates from the same weights, but for sampled ones:
    these are a function of the source, its number and the seed, whatever is generated beside them.

    Attributes:
        end: the token that ends a text.

    Args:
        model: an encoder-decoder, or a causal model. Whether it is in training mode does not
            matter.
        vocabulary: of its tokenizer.
        config: how tokens are chosen.
        device: where the model is.

    Raises:
        ConfigError: such a model or tokenizer cannot generate, or not so much.
    """

    def __init__(
        self,
        model: nn.Module,
        vocabulary: Vocabulary,
        config: Config,
        device: torch.device | None = None,
    ) -> None:
        end = vocabulary.end
        if not isinstance(model, Generates):
            raise ConfigError("a model of this kind writes no text; use t5 or gpt2")
        if model.config.head != "language_model":
            raise ConfigError(
                f"this model has a {model.config.head} head, which predicts no words; use one with "
                "a head for them, "
                "as the one that it was fine-tuned from"
            )
        if not (model.config.encoder_decoder or model.config.causal):
            raise ConfigError(
                "this model sees a text from both sides, so it cannot go on with one; use a model "
                "with an encoder and "
                "a decoder (t5) or a causal one (gpt2, or trained with causal: true), or samestep "
                "fill"
            )
        if end is None or (model.config.encoder_decoder and vocabulary.pad is None):
            missing = (
                "token that ends a text" if end is None else "<pad> for its texts to begin with"
            )
            raise ConfigError(
                f"the tokenizer has no {missing}; use the one that the model was trained with"
            )
        if config.max_new_tokens >= model.max_sequence_length:
            raise ConfigError(
                f"max_new_tokens is {config.max_new_tokens}, and the model takes texts of "
                f"{model.max_sequence_length} "
                "tokens, what comes before included; use less"
            )
        if 2 * config.beams > vocabulary.size:
            raise ConfigError(
                f"beams is {config.beams}; use at most half of the {vocabulary.size} tokens that "
                "there are"
            )
        self._model, self._config, self._device = model, config, device or torch.device("cpu")
        self.end = end
        self._size, self._begin = vocabulary.size, vocabulary.pad or 0

    @torch.no_grad()
    def __call__(self, sources: Sequence[Sequence[int]], first: int = 0) -> list[list[int]]:
        """Generates in batches, the longest sources first.

        Args:
            sources: the tokens that the model reads, those that begin and end a source included;
                none is empty. Of sources that are too long for a table of positions, the last
                tokens are read.
            first: number of the first source.

        Returns:
            The tokens generated for each, without the one that ends them.
        """
        room = self._model.max_sequence_length - self._config.max_new_tokens + 1
        reads_on = not self._model.config.encoder_decoder
        if reads_on and (cut := sum(len(source) > room for source in sources)):
            logger.warning(
                "%d of %d texts are longer than %d tokens, which leave room for max_new_tokens=%d; "
                "they lose their "
                "beginning",
                *(cut, len(sources), room, self._config.max_new_tokens),
            )
            sources = [source[-room:] for source in sources]
        order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
        texts: list[list[int]] = [[]] * len(sources)
        for begin in range(0, len(order), self._config.batch_size):
            numbers = order[begin : begin + self._config.batch_size]
            generated = self._generate(
                [sources[number] for number in numbers], np.array(numbers) + first
            )
            for number, text in zip(numbers, generated.tolist(), strict=True):
                texts[number] = text[: text.index(self.end)] if self.end in text else text
        return texts

    def _generate(self, sources: Sequence[Sequence[int]], numbers: npt.NDArray[np.int64]) -> Tensor:
        """A batch: int64 [B, max_new_tokens], filled up with the token that ends a text."""
        config = self._config
        logits, cache = self._start([torch.tensor(source) for source in sources])
        logits = logits[
            :, : self._size
        ]  # the model's table may have more rows than there are tokens
        if config.beams > 1:
            return beam_search(self._model, logits, cache, self.end, config)
        random = None
        if config.sample:
            keys = combine(config.seed, _SAMPLE, numbers[:, None], np.arange(config.max_new_tokens))
            random = torch.from_numpy(uniform(keys)).to(self._device)
        return one_by_one(self._model, logits, cache, self.end, config, random)

    def _start(self, sources: list[Tensor]) -> tuple[Tensor, Cache]:
        """Reads a batch of sources; what the model's own `start` returns."""
        model, longest = self._model, self._config.max_new_tokens
        has_encoder = model.config.encoder_decoder
        side = "right" if has_encoder else "left"
        tokens = pad_sequence(sources, batch_first=True, padding_side=side)
        real = [torch.ones_like(source) for source in sources]
        segments = pad_sequence(real, batch_first=True, padding_side=side)
        is_full = bool(segments.all())
        tokens, segments = tokens.to(self._device), segments.to(self._device)
        if has_encoder:
            target = torch.full_like(tokens[:, :1], self._begin)
            inputs = Inputs(tokens, None if is_full else segments, target_tokens=target)
            return model.start(inputs, longest)
        prefix = segments > 0 if model.config.prefix_lm else None
        return model.start(Inputs(tokens, segments, prefix=prefix), tokens.shape[1] + longest - 1)
