"""A Transformer with an encoder and a decoder that attends to the encoder's output."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models import Inputs, Outputs
from trainer.models.attention import causal_mask, segment_mask, take
from trainer.models.base import TransformerModel, layer_numbers, matrix_flops
from trainer.models.cache import Cache, Memory
from trainer.models.config import TransformerConfig
from trainer.models.dropout import dropout, split_key
from trainer.models.fused import Mask
from trainer.models.relative import RelativeBias
from trainer.models.stack import Context, Stack

START = 0
"""Id of the decoder's first input token: T5's padding."""


class _Keys(NamedTuple):
    """Dropout keys of each part; of layers, [layers, sites, B]."""

    embeddings: Tensor | None = None
    after_encoder: Tensor | None = None
    after_decoder: Tensor | None = None
    encoder: Tensor | None = None
    decoder: Tensor | None = None
    head: Tensor | None = None


class EncoderDecoder(TransformerModel):
    """An encoder and a decoder with pre-norm, relative positions and shared token embeddings.

    With a task's head, encoder and decoder get the same text, so each position of the decoder has
    seen the whole sequence through cross-attention. Or there is no decoder, and the head reads the
    encoder.

    Args:
        encoder_bias, decoder_bias: added to the scores of self-attention.
        decoder_layers: number of the decoder's layers, 0 for none; the encoder has
            `config.layers`.
        shared: whether the encoder uses the decoder's layers, without cross-attention, and its
            norm (Raffel et al. 2020, section 3.2.2).
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
        # The order of registration is the order of parameters in optimizers and checkpoints.
        self.embeddings = config.build_embeddings()
        self.encoder = None
        if not shared:
            self.encoder = Stack(config.build_layer(index) for index in range(config.layers))
        self.encoder_bias = encoder_bias
        self.encoder_norm = None if shared else config.build_norm()
        self.decoder = Stack(
            config.build_layer(index, cross_attention=True) for index in range(decoder_layers)
        )
        self.decoder_bias = decoder_bias if decoder_layers else None
        self.decoder_norm = config.build_norm() if decoder_layers else nn.Identity()
        self.head = head

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name (see `trainer.models.Outputs`).

        `positions` are not used, since attention depends only on distances. With a task's head the
        decoder's input is `tokens` shifted right by one instead of `target_tokens`.
        """
        tokens, segments = inputs.tokens, inputs.segments
        keys = self._keys(inputs.dropout_key)
        found: dict[str, Tensor] = {}
        if numbers := layer_numbers(outputs):
            found = self._layer_states(inputs, keys, numbers)
            if len(found) == len(outputs):
                return found
        whole = "hidden" in outputs
        if not self.decoder:
            # A tagger: its head reads the encoder.
            source, matrix = self._embed_source(inputs, keys.embeddings)
            read = None if whole else self.pooled(inputs.predicted)
            hidden = self._encode(inputs, source, keys, read)
            hidden = hidden if read is not None else hidden[:, self.inserted :]
            return found | self._answer(inputs, hidden, matrix, keys.head, outputs)
        targets, target_segments = inputs.target_tokens, inputs.target_segments
        if self.config.head != "language_model":
            targets, target_segments = F.pad(tokens[:, :-1], (1, 0), value=START), segments
        assert targets is not None, "a language model needs target_tokens"
        both_or_neither = (segments is None) == (target_segments is None)
        assert both_or_neither, "both sides need segments, or neither"
        # One lookup for both sides: its backward pass fills one matrix of gradients, not two.
        both, matrix = self.embeddings(
            torch.cat([tokens, targets], 1), None, dropout_key=keys.embeddings
        )
        # The dropout of the embeddings was computed over source and target together.
        source, hidden = both.split([tokens.shape[1], targets.shape[1]], 1)
        source = self._prompted(source)
        encoded = self._encode(inputs, source, keys)
        context = Context(
            sites=self.config.dropout_sites,
            keys=keys.decoder,
            columns=self.columns(inputs),
        )
        between = target_segments, self.with_prompt(segments)
        if self.fuses_attention:
            # Target padding attends to nothing, instead of to the whole source as in `_between`:
            # the kernel returns zeros there, which nothing reads.
            fused = Mask(target_segments, causal=True)
            context = replace(context, fused=fused, fused_memory=Mask(*between))
            assert self.decoder_bias is not None, "the model has a decoder"
            bias = self.decoder_bias.by_distance(targets.shape[1], targets.shape[1])
        else:
            context = replace(context, memory_mask=_between(*between))
            bias = self._decoder_bias(targets, target_segments)
        # A prompt comes before the source only, so target positions are not shifted.
        read = None if whole else inputs.predicted
        hidden = self.decoder.run(hidden, encoded, bias, context, read)
        after = keys.after_decoder
        hidden = dropout(self.decoder_norm(hidden), self.config.dropout, after, read)
        return found | self._answer(inputs, hidden, matrix, keys.head, outputs)

    def _keys(self, key: Tensor | None) -> _Keys:
        if not self.training or key is None:
            return _Keys()
        encoder, sites = len(self._encoder_layers), len(self.config.dropout_sites)
        layers = encoder + len(self.decoder)
        # The order of keys is part of the numerics: embeddings, after encoder, after decoder,
        # layers, head.
        keys = split_key(key, 4 + sites * layers)
        of_layers = keys[3:-1].view(layers, sites, -1)
        return _Keys(
            embeddings=keys[0],
            after_encoder=keys[1],
            after_decoder=keys[2],
            encoder=of_layers[:encoder],
            decoder=of_layers[encoder:],
            head=keys[-1],
        )

    def _answer(
        self,
        inputs: Inputs,
        hidden: Tensor,
        matrix: Tensor,
        key: Tensor | None,
        outputs: Outputs,
    ) -> dict[str, Tensor]:
        """The head's output; `hidden` has all positions if it is an output itself."""
        found = {}
        if "hidden" in outputs:
            found["hidden"] = hidden
            hidden = take(hidden, inputs.predicted)
        if self.config.predicts in outputs:
            found |= self.answer(self.config.predicts, self.head, inputs, hidden, matrix, key)
        return found

    def _embed_source(
        self, inputs: Inputs, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of prompt and source [B, n + S, D], and the token embeddings [V, D]."""
        hidden, matrix = self.embeddings(inputs.tokens, None, dropout_key=dropout_key)
        return self._prompted(hidden), matrix

    def _prompted(self, hidden: Tensor) -> Tensor:
        out: Tensor = hidden if self.prompt is None else self.prompt(hidden)
        return out

    @property
    def _encoder_layers(self) -> Stack:
        return self.decoder if self.encoder is None else self.encoder

    @property
    def _encoder_norm(self) -> nn.Module:
        return self.decoder_norm if self.encoder_norm is None else self.encoder_norm

    def _encoder_context(
        self, inputs: Inputs, hidden: Tensor, keys: _Keys
    ) -> tuple[Tensor, Context]:
        """The encoder's relative bias and its context; the mask is in one of them."""
        length, segments = hidden.shape[1], self.with_prompt(inputs.segments)
        sites, columns = self.config.dropout_sites, self.columns(inputs)
        context = Context(sites=sites, keys=keys.encoder, columns=columns)
        if self.fuses_attention:
            bias = self.encoder_bias.by_distance(length, length)
            return bias, replace(context, fused=Mask(segments))
        mask = None if segments is None else segment_mask(segments)
        return self.encoder_bias(length, length, mask), context

    def _encode(
        self,
        inputs: Inputs,
        hidden: Tensor,
        keys: _Keys,
        positions: Tensor | None = None,
    ) -> Tensor:
        """The encoder's output: [B, S, D] -> [B, S, D], or [B, P, D] for `positions` [B, P]."""
        bias, context = self._encoder_context(inputs, hidden, keys)
        hidden = self._encoder_layers.run(hidden, None, bias, context, positions)
        hidden = self._encoder_norm(hidden)
        return dropout(hidden, self.config.dropout, keys.after_encoder, positions)

    def _layer_states(self, inputs: Inputs, keys: _Keys, numbers: list[int]) -> dict[str, Tensor]:
        """The outputs `layer.N`: the encoder's hidden states, without a prompt's positions."""
        source, _ = self._embed_source(inputs, keys.embeddings)
        bias, context = self._encoder_context(inputs, source, keys)
        layers, last = self._encoder_layers, numbers[-1]
        _, states, _ = layers.states(source, None, bias, context, numbers, last)
        if last == len(layers):
            states[last] = self._encoder_norm(states[last])
        return {f"layer.{number}": states[number][:, self.inserted :] for number in numbers}

    def _decoder_bias(self, tokens: Tensor, segments: Tensor | None) -> Tensor:
        assert self.decoder_bias is not None, "the model has no decoder"
        mask = causal_mask(tokens) if segments is None else segment_mask(segments, causal=True)
        bias: Tensor = self.decoder_bias(tokens.shape[1], tokens.shape[1], mask)
        return bias

    @torch.no_grad()
    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        """Encodes sources and processes the first target tokens.

        Args:
            inputs: tokens; segments, 0 for padding, else 1, or None without padding; and target
                tokens, at least the start token.
            capacity: of the decoder's cache in positions, T included.

        Returns:
            The logits [B, V] of the next tokens, and the cache for `step`.
        """
        targets = inputs.target_tokens
        assert targets is not None, "a decoder needs at least the start token"
        hidden, _ = self._embed_source(inputs)
        encoded = self._encode(inputs, hidden, _Keys())
        segments = self.with_prompt(inputs.segments)
        # While decoding, a row is one sequence, so the mask only excludes padding of the source.
        memory = Memory(encoded, None if segments is None else (segments > 0)[:, None, None, :])
        is_text = torch.ones_like(targets, dtype=torch.bool)
        cache = Cache(len(self.decoder), capacity, is_text, memory)
        return self._decode(targets, self._decoder_bias(targets, None), cache), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Processes one token per row: int [B] -> the logits [B, V] of the next ones."""
        assert self.decoder_bias is not None, "the model has no decoder"
        bias = self.decoder_bias(1, cache.length + 1, cache.mask(), before=cache.length)
        return self._decode(tokens[:, None], bias, cache)

    def _decode(self, tokens: Tensor, bias: Tensor, cache: Cache) -> Tensor:
        assert cache.memory is not None, "a decoder attends to its source"
        hidden, matrix = self.embeddings(tokens, None)
        last = torch.full_like(tokens[:, :1], tokens.shape[1] - 1)
        context = Context(memory_mask=cache.memory.mask)
        hidden = self.decoder.run(hidden, cache.memory.hidden, bias, context, last, cache)
        logits: Tensor = self.head(self.decoder_norm(hidden), matrix)[:, 0]
        return logits

    @property
    def max_sequence_length(self) -> int:
        return sys.maxsize

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """Like `Transformer.flops_per_token`, per position of the encoder.

        The decoder of a language model has T = predicted_per_token * S positions, all predicted;
        with a task's head T = S. Keys and values of cross-attention count per encoder position; the
        rest of the decoder counts per decoder position, except the last feed-forward network, which
        counts per predicted one. The decoder attends to T and to S positions.
        """
        # 12 H K per pair of positions: scores and mixing, 2 FLOPs each, forward and twice backward.
        per_position = 12 * self.config.heads * self.config.head_width
        encoder = matrix_flops(self._encoder_layers, without="cross_attention")
        keys_values = matrix_flops(self.decoder, only="cross_attention.kv")
        for_predicted = matrix_flops(self.decoder[-1:], only="ffn")
        decoder = matrix_flops(self.decoder) - keys_values - for_predicted
        is_language_model = self.config.head == "language_model"
        targets_per_token = predicted_per_token if is_language_model else 1.0
        targets = targets_per_token * sequence_length
        layers = len(self._encoder_layers)
        embeddings = self.embedding_flops()
        source = embeddings + encoder + keys_values + per_position * layers * sequence_length
        target = decoder + per_position * len(self.decoder) * (targets + sequence_length)
        target += embeddings if self.decoder else 0
        head = predicted_per_token * (for_predicted + self.head_flops())
        return source + targets_per_token * target + head


def _between(target_segments: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """The cross-attention mask, bool [B, 1, T, S]: a target attends to its segment's source."""
    if target_segments is None or segments is None:
        return None
    same = target_segments[:, None, :, None] == segments[:, None, None, :]
    # Target padding attends to the whole source: the source may have no padding, and a row of the
    # mask without any True would give NaN.
    return same | (target_segments == 0)[:, None, :, None]
