"""Generation: causal models continue texts, encoder-decoders generate them from sources."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samestep.errors import ConfigError
from samestep.examples import Vocabulary
from samestep.hashing import combine, name_key, uniform
from trainer.generation.config import Config as Config
from trainer.generation.generates import Generates
from trainer.generation.search import beam_search, one_by_one
from trainer.models.cache import Cache
from trainer.models.inputs import Inputs

logger = logging.getLogger(__name__)

_SAMPLE = name_key("generation.sample")


class Generator:
    """Generates a text for each source.

    The texts are the ones that `transformers` generates from the same weights, except for sampled
    ones. A sampled text is a function of the source, its number and the seed, and does not depend
    on the batch.

    Attributes:
        end: the token that ends a text.

    Args:
        model: an encoder-decoder, or a causal model; in training mode or not.
        vocabulary: of its tokenizer.
        config: how tokens are chosen.
        device: where the model is.

    Raises:
        ConfigError: the model or tokenizer cannot generate, or not texts of this length.
    """

    def __init__(
        self,
        model: nn.Module,
        vocabulary: Vocabulary,
        config: Config,
        device: torch.device | None = None,
    ) -> None:
        if not isinstance(model, Generates):
            raise ConfigError("a model of this kind writes no text. Use t5, bart or gpt2.")
        head, has_encoder, end = model.config.head, model.config.encoder_decoder, vocabulary.end
        if head == "embedding":
            raise ConfigError(
                "this model is an encoder alone, without a decoder or head that writes text. Use a "
                "whole one, as T5ForConditionalGeneration instead of T5EncoderModel."
            )
        if head != "language_model":
            raise ConfigError(
                f"this model has the head {head}, which predicts no words; use one with "
                "a language-model head, as the one that it was fine-tuned from"
            )
        if not (has_encoder or model.config.causal):
            raise ConfigError(
                "this model sees a text from both sides and cannot continue it. Use an "
                "encoder-decoder (t5, bart) or a causal model (gpt2, or trained with causal: "
                "true), or samestep fill."
            )
        if end is None or (has_encoder and vocabulary.pad is None):
            missing = "token that ends a text" if end is None else "<pad>, with which targets begin"
            raise ConfigError(
                f"the tokenizer has no {missing}. Use the one that the model was trained with."
            )
        if config.max_new_tokens >= model.max_sequence_length:
            raise ConfigError(
                f"max_new_tokens is {config.max_new_tokens}, and the model takes texts of "
                f"{model.max_sequence_length} tokens, prompt included. Use fewer."
            )
        # Beam search looks at 2 * beams candidates, which are different tokens at first.
        if 2 * config.beams > vocabulary.size:
            raise ConfigError(
                f"beams is {config.beams}. Use at most half of the {vocabulary.size} tokens of the "
                "vocabulary."
            )
        self.end = end
        self._model, self._config, self._device = model, config, device or torch.device("cpu")
        self._size, self._begin = vocabulary.size, vocabulary.pad or 0

    @torch.no_grad()
    def __call__(self, sources: Sequence[Sequence[int]], first: int = 0) -> list[list[int]]:
        """Generates in batches, the longest sources first.

        Args:
            sources: the tokens that the model reads, special tokens included; none is empty. Of a
                prompt that is too long for the model, only the last tokens are read; of a source,
                the first and the end token.
            first: number of the first source, which keys sampling.

        Returns:
            The generated tokens of each source, without the end token.
        """
        config, batch_size = self._config, self._config.batch_size
        room = self._model.max_sequence_length
        if self._model.config.encoder_decoder:
            if cut := sum(len(source) > room for source in sources):
                logger.warning(
                    "%d of %d texts are longer than the %d tokens that the model takes; they lose "
                    "their end",
                    *(cut, len(sources), room),
                )
                # The last token is the one that ends a source.
                sources = [[*source[:-1][: room - 1], source[-1]] for source in sources]
        else:
            # A decoder needs positions for the prompt and all new tokens but the last.
            room -= config.max_new_tokens - 1
            if cut := sum(len(source) > room for source in sources):
                logger.warning(
                    "%d of %d texts are longer than %d tokens, which leave room for "
                    "max_new_tokens=%d; they lose their beginning",
                    *(cut, len(sources), room, config.max_new_tokens),
                )
                sources = [source[-room:] for source in sources]
        # The longest first, so that running out of memory shows at once. Sorting is stable: equal
        # lengths stay in order.
        order = sorted(range(len(sources)), key=lambda number: -len(sources[number]))
        texts: list[list[int]] = [[]] * len(sources)
        for begin in range(0, len(order), batch_size):
            numbers = order[begin : begin + batch_size]
            batch = [sources[number] for number in numbers]
            generated = self._generate(batch, np.array(numbers) + first).tolist()
            for number, text in zip(numbers, generated, strict=True):
                texts[number] = text[: text.index(self.end)] if self.end in text else text
        return texts

    def _generate(self, sources: Sequence[Sequence[int]], numbers: npt.NDArray[np.int64]) -> Tensor:
        """Generates a batch: int64 [B, max_new_tokens], padded with the end token."""
        config = self._config
        logits, cache = self._start([torch.tensor(source) for source in sources])
        # The model's table may have more rows than the tokenizer has tokens.
        logits = logits[:, : self._size]
        if config.beams > 1:
            return beam_search(self._model, logits, cache, self.end, config)
        random = None
        if config.sample:
            # A number for each position of each text, so a text that ends early changes no other.
            places = np.arange(config.max_new_tokens)
            keys = combine(config.seed, _SAMPLE, numbers[:, None], places)
            random = torch.from_numpy(uniform(keys)).to(self._device)
        return one_by_one(self._model, logits, cache, self.end, config, random)

    def _start(self, sources: list[Tensor]) -> tuple[Tensor, Cache]:
        """Processes a batch of sources; returns the result of the model's `start`."""
        model, longest = self._model, self._config.max_new_tokens
        has_encoder = model.config.encoder_decoder
        # A decoder's prompts end together, so that each next token is in one column:
        #
        #     encoder  a b c    decoder  a b c
        #              d - -             - - d
        side = "right" if has_encoder else "left"
        tokens = pad_sequence(sources, batch_first=True, padding_side=side).to(self._device)
        real = [torch.ones_like(source) for source in sources]
        segments = pad_sequence(real, batch_first=True, padding_side=side).to(self._device)
        if has_encoder:
            target = torch.full_like(tokens[:, :1], self._begin)
            # Without segments, attention needs no mask.
            is_full = len(set(map(len, sources))) == 1
            inputs = Inputs(tokens, None if is_full else segments, target_tokens=target)
            return model.start(inputs, longest)
        prefix = segments > 0 if model.config.prefix_lm else None
        inputs = Inputs(tokens, segments, prefix=prefix)
        return model.start(inputs, tokens.shape[1] + longest - 1)
