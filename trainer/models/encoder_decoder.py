"""A Transformer with an encoder and a decoder that attends to the encoder's output."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models import Outputs
from trainer.models.base import TransformerModel, layer_numbers, matrix_flops
from trainer.models.cache import Cache, Memory
from trainer.models.config import TransformerConfig
from trainer.models.extras import HeadInput
from trainer.models.fused import Mask
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import causal_mask, segment_mask, take
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.relative import RelativeBias
from trainer.models.stack import Context, Stack


class _Keys(NamedTuple):
    """Dropout keys of each part; of layers, [layers, sites, B]."""

    embeddings: Tensor | None = None
    encoder_positions: Tensor | None = None
    decoder_positions: Tensor | None = None
    after_encoder: Tensor | None = None
    after_decoder: Tensor | None = None
    encoder: Tensor | None = None
    decoder: Tensor | None = None
    head: Tensor | None = None


class EncoderDecoder(TransformerModel):
    """An encoder and a decoder with shared token embeddings.

    With a task's head, encoder and decoder get the same text, so each position of the decoder has
    seen the whole sequence through cross-attention. Or there is no decoder, and the head reads the
    encoder.

    Args:
        decoder_layers: number of the decoder's layers, 0 for none; the encoder has
            `config.layers`.
        encoder_bias, decoder_bias: added to the scores of self-attention, for relative positions.
        encoder_positions, decoder_positions: called as positions(hidden, positions, dropout_key),
            between the embeddings of tokens and the first layer.
        shared: whether the encoder uses the decoder's layers, without cross-attention, and its
            norm (Raffel et al. 2020, section 3.2.2).
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: nn.Module,
        *,
        decoder_layers: int,
        encoder_bias: RelativeBias | None = None,
        decoder_bias: RelativeBias | None = None,
        encoder_positions: nn.Module | None = None,
        decoder_positions: nn.Module | None = None,
        shared: bool = False,
    ) -> None:
        super().__init__(config)
        # The order of registration is the order of parameters in optimizers and checkpoints.
        self.embeddings = config.build_embeddings()
        self.encoder_positions = encoder_positions
        self.decoder_positions = decoder_positions if decoder_layers else None
        self.encoder = None
        if not shared:
            self.encoder = Stack(config.build_layer(index) for index in range(config.layers))
        self.encoder_bias = encoder_bias
        # Layers of post-norm end with a norm of their own.
        pre = config.norm == "pre"
        self.encoder_norm = config.build_norm() if pre and not shared else None
        self.decoder = Stack(
            config.build_layer(index, cross_attention=True) for index in range(decoder_layers)
        )
        self.decoder_bias = decoder_bias if decoder_layers else None
        self.decoder_norm = config.build_norm() if pre and decoder_layers else nn.Identity()
        self.head = head
        self.add_extras(config.build_extras())

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes the outputs, by name (see `trainer.models.Outputs`).

        With a task's head the decoder's input is `tokens` shifted right by one instead of
        `target_tokens`.
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
            source, matrix = self._embed_source(inputs, keys)
            read = None if whole else self.pooled(inputs.predicted)
            hidden = self._encode(inputs, source, keys, read)
            hidden = hidden if read is not None else hidden[:, self.inserted :]
            return found | self._answer(inputs, hidden, matrix, keys.head, outputs)
        targets, target_segments, target_positions = self._targets(inputs)
        both_or_neither = (segments is None) == (target_segments is None)
        assert both_or_neither, "both sides need segments, or neither"
        # One lookup for both sides: its backward pass fills one matrix of gradients, not two.
        both, matrix = self.embeddings(
            torch.cat([tokens, targets], 1), None, dropout_key=keys.embeddings
        )
        # The dropout of the embeddings was computed over source and target together.
        source, hidden = both.split([tokens.shape[1], targets.shape[1]], 1)
        source = self._placed_source(inputs, source, keys)
        encoded = self._encode(inputs, source, keys)
        hidden = self._placed_target(hidden, target_positions, keys.decoder_positions)
        bias, context = self._visible(
            targets, target_segments, self.decoder_bias, causal=True, fuses=self.fuses_attention
        )
        between = target_segments, self.with_prompt(segments)
        # Under a fused kernel, target padding attends to nothing instead of to the whole source as
        # in `_between`: the kernel returns zeros there, which nothing reads.
        context = replace(
            context,
            sites=self.config.dropout_sites,
            keys=keys.decoder,
            columns=self.columns(inputs) | self._target_columns(target_positions, targets),
            memory_mask=None if self.fuses_attention else _between(*between),
            fused_memory=Mask(*between) if self.fuses_attention else None,
        )
        # A prompt comes before the source only, so target positions are not shifted.
        read = None if whole else inputs.predicted
        hidden = self.decoder.run(hidden, encoded, bias, context, read)
        after = keys.after_decoder
        hidden = self._finish(self.decoder_norm(hidden), after, read)
        return found | self._answer(inputs, hidden, matrix, keys.head, outputs)

    def _targets(self, inputs: Inputs) -> tuple[Tensor, Tensor | None, Tensor]:
        """The decoder's input and its segments, int [B, T], and positions, [B, T] or [1, T].

        With a task's head, the input is the text, shifted right by the start token.
        """
        start = self.config.start_token
        assert start is not None, "a family with a decoder has a start token"
        if self.config.head != "language_model":
            shifted = F.pad(inputs.tokens[:, :-1], (1, 0), value=start)
            return shifted, inputs.segments, _counted(inputs.positions, shifted)
        targets = inputs.target_tokens
        assert targets is not None, "a language model needs target_tokens"
        positions = _counted(inputs.target_positions, targets)
        if self.config.sets_start:
            targets = targets.masked_fill(positions == 0, start)
        return targets, inputs.target_segments, positions

    def _target_columns(self, positions: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """What the decoder's layers read of positions, [B, T] or [1, T], of targets [B, T]."""
        if not self.config.reads_positions:
            return {}
        return self.config.position_columns(positions.expand(len(targets), -1))

    def _keys(self, key: Tensor | None) -> _Keys:
        if not self.training or key is None:
            return _Keys()
        encoder, sites = len(self._encoder_layers), len(self.config.dropout_sites)
        layers = encoder + len(self.decoder)
        # The order of keys is part of the numerics: embeddings, after encoder, after decoder,
        # layers, head.
        keys = split_key(key, 4 + sites * layers)
        of_layers = keys[3:-1].view(layers, sites, -1)
        of_positions = split_key(keys[0], 2)
        return _Keys(
            embeddings=keys[0],
            encoder_positions=of_positions[0],
            decoder_positions=of_positions[1],
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
        for extra in self.extras:
            found |= extra.answer(self, HeadInput(inputs, outputs, hidden, hidden, matrix))
        return found

    def _embed_source(self, inputs: Inputs, keys: _Keys) -> tuple[Tensor, Tensor]:
        """Embeddings of prompt and source [B, n + S, D], and the token embeddings [V, D]."""
        hidden, matrix = self.embeddings(inputs.tokens, None, dropout_key=keys.embeddings)
        return self._placed_source(inputs, hidden, keys), matrix

    def _placed_source(self, inputs: Inputs, hidden: Tensor, keys: _Keys) -> Tensor:
        """Inserts the prompt and adds positions: [B, S, D] -> [B, n + S, D]."""
        hidden = hidden if self.prompt is None else self.prompt(hidden)
        if self.encoder_positions is None:
            return hidden
        # Text comes after a prefix, as after a prompt, so its positions are shifted.
        positions = self.positions(inputs) + self.config.virtual_tokens - self.inserted
        placed: Tensor = self.encoder_positions(hidden, positions, keys.encoder_positions)
        return placed

    def _placed_target(
        self, hidden: Tensor, positions: Tensor, dropout_key: Tensor | None = None
    ) -> Tensor:
        """Adds positions to targets: [B, T, D] -> [B, T, D]."""
        if self.decoder_positions is None:
            return hidden
        # A prefix comes before the targets as well, a prompt does not.
        positions = positions + self.config.virtual_tokens - self.inserted
        placed: Tensor = self.decoder_positions(hidden, positions, dropout_key)
        return placed

    def _finish(
        self, hidden: Tensor, dropout_key: Tensor | None, positions: Tensor | None
    ) -> Tensor:
        """Applies the dropout after the last norm."""
        if not self.config.final_dropout:
            return hidden
        return dropout(hidden, self.config.dropout, dropout_key, positions)

    @property
    def _encoder_layers(self) -> Stack:
        return self.decoder if self.encoder is None else self.encoder

    @property
    def _encoder_norm(self) -> nn.Module:
        return self.decoder_norm if self.encoder_norm is None else self.encoder_norm

    def _encoder_context(
        self, inputs: Inputs, hidden: Tensor, keys: _Keys
    ) -> tuple[Tensor | None, Context]:
        """The encoder's relative bias and its context; the mask is in one of them."""
        segments = self.with_prompt(inputs.segments)
        bias, context = self._visible(
            hidden[..., 0], segments, self.encoder_bias, causal=False, fuses=self.fuses_attention
        )
        sites, columns = self.config.dropout_sites, self.columns(inputs)
        return bias, replace(context, sites=sites, keys=keys.encoder, columns=columns)

    def _visible(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        relative: RelativeBias | None,
        *,
        causal: bool,
        fuses: bool,
    ) -> tuple[Tensor | None, Context]:
        """The relative bias of a stack, and a context that says which positions attend to which.

        The mask is in one of them. `tokens` [B, S] give the shape.
        """
        length = tokens.shape[1]
        if fuses:
            bias = None if relative is None else relative.by_distance(length, length)
            return bias, Context(fused=Mask(segments, causal=causal))
        mask = None if segments is None else segment_mask(segments, causal)
        if relative is None:
            return None, Context(mask=mask, causal=causal, segments=segments)
        # A bias has to contain the direction, which the kernel would apply itself.
        if mask is None and causal:
            mask = causal_mask(tokens)
        return relative(length, length, mask), Context()

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
        return self._finish(self._encoder_norm(hidden), keys.after_encoder, positions)

    def _layer_states(self, inputs: Inputs, keys: _Keys, numbers: list[int]) -> dict[str, Tensor]:
        """The outputs `layer.N`: the encoder's hidden states, without a prompt's positions."""
        source, _ = self._embed_source(inputs, keys)
        bias, context = self._encoder_context(inputs, source, keys)
        layers, last = self._encoder_layers, numbers[-1]
        _, states, _ = layers.states(source, None, bias, context, numbers, last)
        if last == len(layers):
            states[last] = self._encoder_norm(states[last])
        return {f"layer.{number}": states[number][:, self.inserted :] for number in numbers}

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
        targets, _, positions = self._targets(inputs)
        hidden, _ = self._embed_source(inputs, _Keys())
        encoded = self._encode(inputs, hidden, _Keys())
        segments = self.with_prompt(inputs.segments)
        # While decoding, a row is one sequence, so the mask only excludes padding of the source.
        memory = Memory(encoded, None if segments is None else (segments > 0)[:, None, None, :])
        is_text = torch.ones_like(targets, dtype=torch.bool)
        cache = Cache(len(self.decoder), capacity, is_text, memory)
        # The fused kernel reads no cache.
        bias, context = self._visible(targets, None, self.decoder_bias, causal=True, fuses=False)
        return self._decode(targets, positions, bias, context, cache), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Processes one token per row: int [B] -> the logits [B, V] of the next ones."""
        mask, bias = cache.mask(), None
        if self.decoder_bias is not None:
            bias = self.decoder_bias(1, cache.length + 1, mask, before=cache.length)
        positions, context = cache.positions()[:, None], Context(mask=mask, causal=True)
        return self._decode(tokens[:, None], positions, bias, context, cache)

    def _decode(
        self,
        tokens: Tensor,
        positions: Tensor,
        bias: Tensor | None,
        context: Context,
        cache: Cache,
    ) -> Tensor:
        assert cache.memory is not None, "a decoder attends to its source"
        hidden, matrix = self.embeddings(tokens, None)
        hidden = self._placed_target(hidden, positions)
        last = torch.full_like(tokens[:, :1], tokens.shape[1] - 1)
        columns = self._target_columns(positions, tokens)
        context = replace(context, memory_mask=cache.memory.mask, columns=columns)
        hidden = self.decoder.run(hidden, cache.memory.hidden, bias, context, last, cache)
        logits: Tensor = self.head(self.decoder_norm(hidden), matrix)[:, 0]
        return logits

    @property
    def max_sequence_length(self) -> int:
        """Maximum length of a source or target in the position tables, in tokens."""
        rows = self.config.max_positions
        return sys.maxsize if rows is None else rows - self.config.virtual_tokens

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


def _counted(positions: Tensor | None, tokens: Tensor) -> Tensor:
    """Positions of tokens [B, T]: given ones, or else 0, 1, ... as [1, T]."""
    if positions is not None:
        return positions
    return torch.arange(tokens.shape[1], device=tokens.device)[None]


def _between(target_segments: Tensor | None, segments: Tensor | None) -> Tensor | None:
    """The cross-attention mask, bool [B, 1, T, S]: a target attends to its segment's source."""
    if target_segments is None or segments is None:
        return None
    same = target_segments[:, None, :, None] == segments[:, None, None, :]
    # Target padding attends to the whole source: the source may have no padding, and a row of the
    # mask without any True would give NaN.
    return same | (target_segments == 0)[:, None, :, None]
