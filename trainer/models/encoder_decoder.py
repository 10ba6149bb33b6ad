"""A Transformer of two stacks of layers: the decoder attends to itself and to the encoder's output."""

from __future__ import annotations

import sys

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models.attention import causal_mask, segment_mask, take
from trainer.models.cache import Cache, Memory
from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout, split_key
from trainer.models.embeddings import Embeddings
from trainer.models.layers import Layer, make_norm, run_layers
from trainer.models.model import Model, matrix_flops
from trainer.models.relative import RelativeBias

START = 0
"""The token that stands before what the decoder reads for a task's head: T5's padding."""


class EncoderDecoder(Model):
    """An encoder and a decoder with norm `pre`, relative positions and one table of tokens.

    For a task's head the decoder reads what the encoder does, so that each of its cells has seen a whole sequence; or
    there is no decoder, and the head reads the encoder.

    Args:
        config: shape and family.
        head: turns hidden states of the decoder, the token embeddings and a key for dropout into logits.
        encoder_bias, decoder_bias: of the attention scores, without cross-attention's.
        decoder_layers: layers of the decoder, 0 to go without; the encoder has `config.layers`.
        shared: whether the encoder is the decoder's layers without their cross-attention (Raffel et al. 2020, section
            3.2.2), and its norm the decoder's.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: nn.Module,
        *,
        encoder_bias: RelativeBias,
        decoder_bias: RelativeBias,
        decoder_layers: int,
        shared: bool,
    ) -> None:
        super().__init__(config)
        self.embeddings = Embeddings(config)
        self.encoder = None if shared else nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.encoder_bias = encoder_bias
        self.encoder_norm = None if shared else make_norm(config)
        self.decoder = nn.ModuleList(Layer(config, cross_attention=True) for _ in range(decoder_layers))
        self.decoder_bias = decoder_bias if decoder_layers else None
        self.decoder_norm = make_norm(config) if decoder_layers else nn.Identity()
        self.head = head

    def forward(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        target_tokens: Tensor | None = None,
        target_segments: Tensor | None = None,
        positions: Tensor | None = None,
        target_positions: Tensor | None = None,
        predicted: Tensor | None = None,
        dropout_key: Tensor | None = None,
        hidden_states: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Scores every token of the vocabulary, or what a task's head has classes for, at the predicted positions.

        Args:
            tokens: int [B, S], what the encoder reads.
            segments: int [B, S]; 0 is padding, 1, 2, ... the sequences packed in a row. A cell attends to its segment.
                None: each row is one sequence that fills it.
            target_tokens: int [B, T], what the decoder reads: each target moved right by one, after a start token. With
                a task's head these are `tokens`, moved in the same way, and are not given.
            target_segments: int [B, T]; a cell attends to itself and those before it in its segment, and to the
                encoder's cells of the same number. None as above, with `segments`.
            positions, target_positions: not read: distances between cells are enough.
            predicted: int [B, P], the decoder's cells to predict, or that a task's head reads; None predicts all.
            dropout_key: int32 [B], a random key for each row; None, or a model in eval mode, means no dropout.
            hidden_states: whether to return those that the head reads, of all cells.

        Returns:
            Logits [B, P, V], or [B, T, V] when `predicted` is None; with a task's head its classes C in place of V.
            With `hidden_states`, a pair of these and [B, T, D].
        """
        if self.config.head != "language_model":
            target_tokens, target_segments = F.pad(tokens[:, :-1], (1, 0), value=START), segments
        assert target_tokens is not None, "a language model needs the tokens that its decoder reads"
        assert (segments is None) == (target_segments is None), "either both sides have segments, or neither"
        encoder_layers = len(self._encoder_layers)
        read = None if hidden_states else predicted  # the cells of the last layer that the head reads
        embedding_key, after_encoder, after_decoder, head_key = None, None, None, None
        layer_keys: Tensor | list[None] = [None] * (encoder_layers + len(self.decoder))
        if self.training and dropout_key is not None:
            places = self.config.dropout_places
            keys = split_key(dropout_key, 4 + places * len(layer_keys))
            embedding_key, after_encoder, after_decoder, head_key = *keys[:3], keys[-1]
            layer_keys = keys[3:-1].view(len(layer_keys), places, -1)
        if not self.decoder:
            source, matrix, segments = self.embed(tokens, segments, embedding_key)
            read = None if hidden_states else self.read(predicted)
            encoded = self._encode(source, segments, layer_keys, after_encoder, read)
            encoded = encoded if read is not None else encoded[:, self.inserted :]
            return self._answer(encoded, matrix, head_key, predicted, hidden_states)
        # One look-up for both sides: its backward pass fills a table of gradients once.
        both, matrix = self.embeddings(torch.cat([tokens, target_tokens], 1), None, dropout_key=embedding_key)
        source, hidden = both.split([tokens.shape[1], target_tokens.shape[1]], 1)
        source, segments = self._prompted(source), self.with_prompt(segments)
        encoded = self._encode(source, segments, layer_keys[:encoder_layers], after_encoder)
        memory = Memory(encoded, _between(target_segments, segments))
        mask = self._decoder_mask(target_tokens, target_segments)
        hidden = self.run_layers(
            self.decoder,
            hidden,
            mask,
            layer_keys[encoder_layers:],
            cells=read,
            memory=memory,
            checkpointing=self._checkpointing,
        )
        hidden = dropout(self.decoder_norm(hidden), self.config.dropout, after_decoder, read)
        return self._answer(hidden, matrix, head_key, predicted, hidden_states)

    def _answer(
        self, hidden: Tensor, matrix: Tensor, key: Tensor | None, predicted: Tensor | None, hidden_states: bool
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The logits of the predicted cells; with `hidden_states`, these of all cells, too."""
        if hidden_states:
            return self.head(take(hidden, predicted), matrix, key), hidden
        logits: Tensor = self.head(hidden, matrix, key)
        return logits

    def embed(
        self, tokens: Tensor, segments: Tensor | None, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """What the encoder reads, with a prompt: embeddings [B, n + S, D], the table [V, D], segments of all cells."""
        hidden, matrix = self.embeddings(tokens, None, dropout_key=dropout_key)
        return self._prompted(hidden), matrix, self.with_prompt(segments)

    def _prompted(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden if self.prompt is None else self.prompt(hidden)
        return out

    @property
    def _encoder_layers(self) -> nn.ModuleList:
        return self.decoder if self.encoder is None else self.encoder

    @property
    def _checkpointing(self) -> bool:
        return self.activation_checkpointing and self.training

    def _encode(
        self,
        hidden: Tensor,
        segments: Tensor | None,
        layer_keys: Tensor | list[None],
        final_key: Tensor | None,
        cells: Tensor | None = None,
    ) -> Tensor:
        """The encoder's output: [B, S, D] -> [B, S, D], or [B, P, D] for cells [B, P] alone."""
        length = hidden.shape[1]
        mask = self.encoder_bias(length, length, None if segments is None else segment_mask(segments))
        hidden = self.run_layers(
            self._encoder_layers, hidden, mask, layer_keys, cells=cells, checkpointing=self._checkpointing
        )
        norm = self.decoder_norm if self.encoder_norm is None else self.encoder_norm
        return dropout(norm(hidden), self.config.dropout, final_key, cells)

    def _decoder_mask(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        assert self.decoder_bias is not None, "the model has no decoder"
        mask = causal_mask(tokens) if segments is None else segment_mask(segments, causal=True)
        bias: Tensor = self.decoder_bias(tokens.shape[1], tokens.shape[1], mask)
        return bias

    @torch.no_grad()
    def start(
        self, tokens: Tensor, segments: Tensor | None, target_tokens: Tensor, capacity: int
    ) -> tuple[Tensor, Cache]:
        """Encodes sources, and reads the beginnings of targets which `step` then goes on with.

        Args:
            tokens: int [B, S].
            segments: int [B, S], 0 for padding, else 1; None: there is no padding.
            target_tokens: int [B, T], at least the start token.
            capacity: of the cache in the decoder's cells, T included.

        Returns:
            The logits [B, V] of the next tokens, and what `step` needs.
        """
        hidden, _, segments = self.embed(tokens, segments)
        encoded = self._encode(hidden, segments, [None] * len(self._encoder_layers), None)
        memory = Memory(encoded, None if segments is None else (segments > 0)[:, None, None, :])
        cache = Cache(len(self.decoder), capacity, torch.ones_like(target_tokens, dtype=torch.bool), memory)
        return self._decode(target_tokens, self._decoder_mask(target_tokens, None), cache), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Reads one more token of each target: int [B] -> the logits [B, V] of those after them."""
        assert self.decoder_bias is not None, "the model has no decoder"
        mask = self.decoder_bias(1, cache.length + 1, cache.mask(), before=cache.length)
        return self._decode(tokens[:, None], mask, cache)

    def _decode(self, tokens: Tensor, mask: Tensor, cache: Cache) -> Tensor:
        hidden, matrix = self.embeddings(tokens, None)
        last = torch.full_like(tokens[:, :1], tokens.shape[1] - 1)
        hidden = run_layers(
            self.decoder, hidden, mask, [None] * len(self.decoder), cells=last, memory=cache.memory, cache=cache
        )
        logits: Tensor = self.head(self.decoder_norm(hidden), matrix)[:, 0]
        return logits

    @property
    def max_sequence_length(self) -> int:
        """No sequence is too long: there is no table of positions."""
        return sys.maxsize

    def sharding_units(self) -> list[nn.Module]:
        """The layers in order; embeddings and head share a matrix and stay in the root unit."""
        return [*(self.encoder or ()), *self.decoder]

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs of the matrix products in one forward and backward pass, per cell of the encoder.

        As of `Transformer.flops_per_token`. For a language model all cells of the decoder are predicted: it has
        T = predicted_per_token S of them; for a task's head T = S. Keys and values of cross-attention are computed for
        each cell of the encoder, the rest of the decoder for each of its own, but the last layer's feed-forward network
        for predicted ones; its attention is to T and to S cells.
        """
        per_cell = 12 * self.config.heads * self.config.head_width
        encoder = matrix_flops(self._encoder_layers, without="cross_attention")
        keys_values = matrix_flops(self.decoder, only="cross_attention.kv")
        for_predicted = matrix_flops(self.decoder[-1:], only="ffn")
        decoder = matrix_flops(self.decoder) - keys_values - for_predicted
        targets_per_token = predicted_per_token if self.config.head == "language_model" else 1.0
        targets = targets_per_token * sequence_length
        source = encoder + keys_values + per_cell * len(self._encoder_layers) * sequence_length
        target = decoder + per_cell * len(self.decoder) * (targets + sequence_length)
        return source + targets_per_token * target + predicted_per_token * (for_predicted + self.head_flops())


def _between(target_segments: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """Lets each cell of the decoder attend to the encoder's of its segment: bool [B, 1, T, S]; None: all."""
    if target_segments is None or segments is None:
        return None
    same = target_segments[:, None, :, None] == segments[:, None, None, :]
    # A source may have no padding for the target's to attend to, and a row without any cell would give NaN.
    return same | (target_segments == 0)[:, None, :, None]
