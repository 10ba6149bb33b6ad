"""A Transformer of one stack of layers, configured by the families (bert, roberta, gpt2, openai_gpt, t5)."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import causal_mask, segment_mask, take
from trainer.models.cache import Cache
from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout, split_key
from trainer.models.embeddings import Embeddings
from trainer.models.layers import Layer, make_norm, run_layers
from trainer.models.model import Model, matrix_flops
from trainer.models.relative import RelativeBias


class Transformer(Model):
    """An encoder, or a decoder without one (causal), with a head that predicts tokens, or what a task asks for.

    Args:
        config: shape and family.
        head: turns hidden states, the token embeddings and a key for dropout into logits.
        max_positions: the longest sequence, with learned positions; None goes with `relative_bias`.
        types: token types; None has none, and no norm after the embeddings.
        relative_bias: of all layers' attention scores.
        nsp_head: scores pairs of segments.
        lm_head: scores tokens beside a task's head.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: nn.Module,
        *,
        max_positions: int | None = None,
        types: int | None = None,
        relative_bias: RelativeBias | None = None,
        nsp_head: nn.Module | None = None,
        lm_head: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config, max_positions, types)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.relative_bias = relative_bias
        self.final_norm = make_norm(config) if config.norm == "pre" else None
        self.head = head
        self.nsp_head = nsp_head
        self.lm_head = lm_head
        self._max_positions = max_positions

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        positions: Tensor | None,
        predicted: Tensor | None = None,
        dropout_key: Tensor | None = None,
        token_types: Tensor | None = None,
        next_sentence: bool = False,
        prefix: Tensor | None = None,
        next_tokens: bool = False,
        hidden_states: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores every token of the vocabulary, or what a task's head has classes for, at the predicted positions.

        Args:
            tokens: int [B, S].
            segments: int [B, S]; 0 is padding, 1, 2, ... the sequences packed in a row. A cell attends to its segment.
                None: each row is one sequence that fills it, and PyTorch may take its quickest attention, which
                knows no masks.
            positions: int [B, S], in [0, max_sequence_length); from 0 in each sequence. Models with relative positions
                do not read it.
            predicted: int [B, P], the cells to predict, or that a task's head reads; None predicts all.
            dropout_key: int32 [B], a random key for each row; None, or a model in eval mode, means no dropout.
            token_types: int [B, S]; None means type 0 everywhere.
            next_sentence: whether to score the pair of segments, too; the model needs the head for it.
            prefix: bool [B, S], cells of a causal model that all cells of their segment may attend to; None: no cell.
            next_tokens: whether a causal model with a task's head is to score the token after each cell, too.
            hidden_states: whether to return those that the head reads, of all cells; for models that do none of the
                former two.

        Returns:
            Logits [B, P, V], or [B, S, V] when `predicted` is None; with a task's head its classes C in place of V.
            With `next_sentence`, a pair of these and the logits [B, 2] of "B follows A" and "B is from elsewhere";
            with `next_tokens`, of these and the logits [B, S - 1, V] of the tokens in cells 1 to S - 1;
            with `hidden_states`, of these and [B, S, D].
        """
        embedding_key, final_key = None, None
        layer_keys: Tensor | list[None] = [None] * len(self.layers)
        if self.training and dropout_key is not None:
            places = self.config.dropout_places
            keys = split_key(dropout_key, 2 + places * len(self.layers))
            embedding_key, layer_keys, final_key = keys[0], keys[1:-1].view(len(self.layers), places, -1), keys[-1]
        hidden, matrix, segments, prefix = self.embed(tokens, segments, positions, token_types, embedding_key, prefix)
        read = self.read(predicted)  # the cells of the last layer that the heads read
        if read is not None and next_sentence:
            read = F.pad(read, (1, 0))
        elif next_tokens or hidden_states:
            read = None
        checkpointing = self.activation_checkpointing and self.training
        mask = self._mask(hidden[..., 0], segments, prefix)
        # All that the mask says; a prefix of keys is in neither.
        alone = segments if prefix is None and self.relative_bias is None and not self._has_prefix else None
        hidden = self.run_layers(
            self.layers, hidden, mask, layer_keys, cells=read, checkpointing=checkpointing, segments=alone
        )
        whole = self._finish(hidden, final_key, read)
        hidden = whole if read is not None else whole[:, self.inserted :]
        if next_tokens:
            assert self.lm_head is not None, "the model was built without a language-model head beside its own"
            return self.head(take(hidden, predicted), matrix, final_key), self.lm_head(hidden[:, :-1], matrix)
        if hidden_states:
            of_head = hidden if predicted is None else take(whole, self.read(predicted))
            return self.head(of_head, matrix, final_key), hidden
        if not next_sentence:
            logits: Tensor = self.head(hidden, matrix, final_key)
            return logits
        assert self.nsp_head is not None, "the model was built without a next-sentence head"
        logits = self.head(hidden if predicted is None else hidden[:, 1:], matrix, final_key)
        return logits, self.nsp_head(whole[:, 0])

    def embed(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        positions: Tensor | None,
        token_types: Tensor | None = None,
        dropout_key: Tensor | None = None,
        prefix: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """What the layers read, with the cells of a prompt; arguments as of `forward`.

        Returns:
            The embeddings [B, n + S, D], the token embeddings [V, D], and segments and prefix of all cells.
        """
        positions = None if positions is None else positions + self.config.virtual_tokens
        hidden, matrix = self.embeddings(tokens, positions, token_types, dropout_key, self.prompt)
        return hidden, matrix, self.with_prompt(segments), self.with_prompt(prefix)

    @property
    def _has_prefix(self) -> bool:
        return self.config.virtual_tokens > self.inserted

    def _mask(self, tokens: Tensor, segments: Tensor | None, prefix: Tensor | None) -> Tensor | None:
        """What the layers' attention takes; None where no cell or, in a causal model, every later cell is masked."""
        if segments is None and prefix is not None:
            segments = torch.ones_like(tokens)
        mask = None if segments is None else segment_mask(segments, self.config.causal, prefix)
        if self.relative_bias is None:
            return mask
        if mask is None and self.config.causal:
            mask = causal_mask(tokens)
        bias: Tensor = self.relative_bias(tokens.shape[1], tokens.shape[1], mask)
        return bias

    def _finish(self, hidden: Tensor, dropout_key: Tensor | None = None, cells: Tensor | None = None) -> Tensor:
        """What comes between the last layer and the head."""
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        return dropout(hidden, self.config.dropout, dropout_key, cells) if self.config.final_dropout else hidden

    @torch.no_grad()
    def start(
        self, tokens: Tensor, segments: Tensor, capacity: int, prefix: Tensor | None = None
    ) -> tuple[Tensor, Cache]:
        """Reads the beginnings of sequences which `step` then goes on with, in a causal model.

        Args:
            tokens: int [B, S], padded at the left, so that every row ends with the last token of its beginning.
            segments: int [B, S], 0 for padding, else 1.
            capacity: of the cache in cells, S included; at most `max_sequence_length` of them text.
            prefix: as in `forward`.

        Returns:
            The logits [B, V] of the next tokens, and what `step` needs.
        """
        positions = (segments.cumsum(1) - 1).clamp(min=0)
        hidden, matrix, of_all, prefix = self.embed(tokens, segments, positions, prefix=prefix)
        assert of_all is not None
        cache = Cache(len(self.layers), capacity + self.inserted, of_all > 0)
        return self._decode(hidden, matrix, self._mask(of_all, of_all, prefix), cache), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Reads one more token of each sequence: int [B] -> the logits [B, V] of those after them."""
        mask = cache.mask()
        if self.relative_bias is not None:
            mask = self.relative_bias(1, cache.length + 1, mask, before=cache.length)
        positions = cache.positions()[:, None] + self.config.virtual_tokens - self.inserted
        hidden, matrix = self.embeddings(tokens[:, None], positions)
        return self._decode(hidden, matrix, mask, cache)

    def _decode(self, hidden: Tensor, matrix: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        last = torch.full((len(hidden), 1), hidden.shape[1] - 1, device=hidden.device)
        hidden = run_layers(self.layers, hidden, mask, [None] * len(self.layers), cells=last, cache=cache)
        logits: Tensor = self.head(self._finish(hidden), matrix)[:, 0]
        return logits

    @property
    def max_sequence_length(self) -> int:
        """The longest sequence that the position table serves, in tokens; without one, no sequence is too long."""
        return sys.maxsize if self._max_positions is None else self._max_positions - self.config.virtual_tokens

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order; embeddings and head share a matrix and stay in the root unit."""
        return list(self.layers)

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in one forward and backward pass, per cell of the batch.

        6 per weight of a layer (2 in the forward pass, twice that in the backward; see `matrix_flops`) and 12 S H K
        per layer for attention (scores and mixing, masked cells included); 6 per weight of the head for each predicted
        token. What follows attention in the last layer is computed for predicted tokens alone. A prompt's cells are
        counted as what others attend to only.
        Recomputation under activation checkpointing does not count (Chowdhery et al. 2022, appendix B).
        """
        matrices, for_predicted = matrix_flops(self.layers), matrix_flops(self.layers[-1], without="qkv")
        cells = sequence_length + self.config.virtual_tokens
        attention = 12 * len(self.layers) * cells * self.config.heads * self.config.head_width
        return matrices - for_predicted + attention + predicted_per_token * (for_predicted + self.head_flops())
