"""One vector for each text: a model's hidden states or logits, pooled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data_pipeline.format.shards import Tokens
from trainer.inference.hidden_states import TextEncoder
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.pooling import output_of, pool, positions_at_a_time
from trainer.models.text_inputs import BATCH_TOKENS, batches
from trainer.training.retrieval.search import block_of
from trainer.training.weights.loading import load_weights
from trainer.training.weights.pooling import pooling_of

Given: TypeAlias = Mapping[str, Any]
"""Attributes of `Pooling` that options have set."""


class SentenceEncoder:
    """A trained model that makes a vector of each text, on the best device available.

    Attributes:
        pooling: how.
        width: D, of the vectors; of SPLADE, the size of the vocabulary.
        identity: digest of the weights.
        device: description of the device.
        placed: the device.
        is_sparse: whether most numbers of a vector are 0, as with SPLADE.
        truncated: number of texts that were longer than the model reads, until they are logged.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        given: replace those of the pooling.
        stored: replaces the pooling that goes with the weights.

    Raises:
        ConfigError: the model reads from left to right, and its first token is to be taken, or it
            is in a folder of sentence-transformers.
    """

    def __init__(
        self,
        checkpoint: str,
        given: Given = MappingProxyType({}),
        stored: Pooling | None = None,
    ) -> None:
        weights = load_weights(checkpoint)
        self.identity = weights.identity()
        found = pooling_of(weights, given.get("pool") or (stored.pool if stored else None))
        self.pooling = replace(stored or found or Pooling(), **given)
        self._encoder = encoder = TextEncoder(weights)
        self.device, self.placed = encoder.device, encoder.placed
        self.is_sparse = self.pooling.pool == "splade"
        self.width = encoder.vocab_size if self.is_sparse else encoder.width
        self.truncated = 0
        if found is not None and weights.step is None:
            encoder.check_folder(checkpoint)
        encoder.check_pool(self.pooling.pool)
        encoder.shorten(self.pooling.longest)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """Makes the vectors of texts: fp32 [N, D] on the CPU.

        Args:
            texts: with their prompts.
            batch_tokens: positions computed at a time, padding included.
        """
        encoder = self._encoder
        if self.pooling.lower:
            texts = [text.lower() for text in texts]
        encoded = encoder.tokenizer.encode_batch(texts)
        self.truncated += sum(len(tokens) > encoder.longest for tokens in encoded)
        tokens = [encoder.prepare(each) for each in encoded]
        lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        vectors = torch.empty(len(texts), self.width)
        batch_tokens = positions_at_a_time(self.pooling.pool, encoder.vocab_size, batch_tokens)
        for numbers in batches(lengths, batch_tokens):
            pooled = self._pooled([tokens[number] for number in numbers])
            if self.pooling.normalize:
                pooled = F.normalize(pooled)
            vectors[torch.from_numpy(numbers)] = pooled.cpu()
        return vectors

    def stored(self, texts: Sequence[str], batch_tokens: int = BATCH_TOKENS) -> Tensor:
        """The vectors of texts; sparse ones as a COO tensor, made block by block."""
        if not self.is_sparse:
            return self(texts, batch_tokens)
        block = block_of(self.width)
        groups = [texts[first : first + block] for first in range(0, len(texts), block)]
        return torch.cat([self(group, batch_tokens).to_sparse() for group in groups])

    def _pooled(self, tokens: Sequence[Tokens]) -> Tensor:
        how = self.pooling.pool
        real, states = self._encoder.output(tokens, output_of(how, self._encoder.layers))
        return pool(states, real, how)

    def warn_of_truncation(self, texts: int) -> None:
        """Logs how many of the texts since the last call were truncated, if any."""
        self._encoder.warn_of_truncation(self.truncated, texts)
        self.truncated = 0

    def for_role(
        self, role: Literal["query", "document", "default"], texts: Sequence[str]
    ) -> list[str]:
        """Texts with the prompt of a role before each."""
        prompt: str = getattr(self.pooling, role)
        return [prompt + text for text in texts]
