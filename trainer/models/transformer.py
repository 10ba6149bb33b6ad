"""A Transformer of one stack of layers, configured by the families (bert, roberta, gpt2, ...)."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.models import Outputs
from trainer.models.base import TransformerModel, layer_numbers, matrix_flops
from trainer.models.config import TransformerConfig
from trainer.models.extras import Extra, HeadInput
from trainer.models.fused import Mask
from trainer.models.inputs import Inputs
from trainer.models.layers.attention import SelfAttention, causal_mask, segment_mask, take
from trainer.models.layers.dropout import dropout, split_key
from trainer.models.layers.embeddings import Embeddings
from trainer.models.stack import Context, Stack

if TYPE_CHECKING:
    from trainer.models.cache import Cache
    from trainer.models.layers.relative import RelativeBias


class _Keys(NamedTuple):
    """Dropout keys: of the embeddings, the layers [layers, sites, B], and the head."""

    embeddings: Tensor | None = None
    layers: Tensor | None = None
    final: Tensor | None = None


class _Inner(NamedTuple):
    """Values of single layers that the outputs need, by number.

    Attributes:
        states: hidden states; all if an extra needs the layers.
        attention: the outputs `attention.N`.
        alone: the outputs are nothing else.
        through: the highest layer that has to run.
    """

    states: list[int]
    attention: list[int]
    alone: bool
    through: int


class Transformer(TransformerModel):
    """An encoder, or a decoder-only model, with a head for tokens or for a task.

    Args:
        extras: optional parts, in the order of their parameters.
        relative_bias: added to the attention scores of all layers.
    """

    def __init__(
        self,
        config: TransformerConfig,
        head: nn.Module,
        extras: Sequence[Extra] = (),
        *,
        relative_bias: RelativeBias | None = None,
    ) -> None:
        super().__init__(config)
        # The order of registration is the order of parameters in optimizers and checkpoints.
        self.embeddings = config.build_embeddings()
        self.layers = Stack(config.build_layers())
        self.relative_bias = relative_bias
        self.final_norm = config.build_norm() if config.norm == "pre" else None
        self.head = head
        self.add_extras(extras)
        if config.normalizes_embeddings and isinstance(self.embeddings, Embeddings):
            self.offers |= {"inputs.noise"}
        self.offers |= {f"compared.{n}" for n in range(config.layers + 1)}
        if all(isinstance(each.attention, SelfAttention) for each in self.layers):
            self.offers |= {f"attention.{n}" for n in range(1, config.layers + 1)}
        if config.causal_outputs:
            # The same head scores the tokens in both directions, so either output trains it.
            self.offers |= config.causal_outputs
            self.trains = {k: v for k, v in self.trains.items() if k != config.predicts}

    def reads_for(self, outputs: Outputs) -> frozenset[str]:
        needed = (extra.columns for extra in self.extras if extra.is_needed(outputs))
        return super().reads_for(outputs).union(*needed)

    def forward(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        """Computes outputs by name, of the shapes in `trainer.models.Outputs`."""
        # Every place of dropout has its own key, so masks do not depend on which layers run first.
        keys = self._keys(inputs.dropout_key)
        hidden, matrix, segments, prefix = self._embed(inputs, keys.embeddings)
        inner = self._inner(outputs)
        read = self._read(inputs, outputs, inner)
        causal = self.config.causal or not outputs.isdisjoint(self.config.causal_outputs)
        fuses = self.fuses_attention and not inner.attention
        visible, bias = self._visible(hidden[..., 0], segments, prefix, causal, fuses)
        context = replace(
            visible,
            sites=self.config.dropout_sites,
            keys=keys.layers,
            columns=self.columns(inputs),
        )
        found: dict[str, Tensor] = {}
        shown: dict[int, Tensor] = {}
        if inner.states or inner.attention:
            hidden, states, scores = self.layers.states(
                hidden, None, bias, context, inner.states, inner.through, inner.attention
            )
            shown = {n: self._shown(states[n], n) for n in inner.states}
            found = {f"layer.{n}": shown[n] for n in layer_numbers(outputs)}
            compared = layer_numbers(outputs, "compared")
            found |= {f"compared.{n}": self._fitted(shown[n]) for n in compared}
            found |= {f"attention.{n}": each for n, each in scores.items()}
            if inner.alone:
                return found
        else:
            hidden = self.layers.run(hidden, None, bias, context, read)
        hidden = self._finish(hidden, keys.final, read)
        # Extras run in order, and the head reads the last one's result.
        for extra in self.extras:
            hidden = extra.below_head(hidden, list(shown.values()), segments, keys.final)
        return found | self._answers(inputs, outputs, hidden, matrix, read, keys.final)

    def _inner(self, outputs: Outputs) -> _Inner:
        """The values of single layers that the outputs need."""
        attention = layer_numbers(outputs, "attention")
        states = sorted({*layer_numbers(outputs), *layer_numbers(outputs, "compared")})
        alone = all(name.startswith(("layer.", "compared.", "attention.")) for name in outputs)
        through = max([0, *states, *attention]) if alone else len(self.layers)
        if not alone and any(extra.needs_layers for extra in self.extras):
            states = list(range(len(self.layers) + 1))
        return _Inner(states, attention, alone, through)

    def _read(self, inputs: Inputs, outputs: Outputs, inner: _Inner) -> Tensor | None:
        """The positions [B, P] that the last layer computes, those that heads read; None: all.

        With predictions at positions 3 and 7 and a next-sentence head, which reads position 0:
        [0, 3, 7].
        """
        needed = self._positions(outputs)
        if "hidden" in outputs or "all" in needed or inner.states or inner.attention:
            return None
        read = self.pooled(inputs.predicted)
        if read is not None and "first" in needed:
            read = F.pad(read, (1, 0))
        return read

    def _positions(self, outputs: Outputs) -> set[str]:
        """The positions that the extras need for these outputs; see `Extra.needs_positions`."""
        return {extra.needs_positions for extra in self.extras if extra.is_needed(outputs)}

    def _answers(
        self,
        inputs: Inputs,
        outputs: Outputs,
        whole: Tensor,
        matrix: Tensor,
        read: Tensor | None,
        dropout_key: Tensor | None,
    ) -> dict[str, Tensor]:
        """The outputs of the heads, from the hidden states of the positions `read`."""
        found: dict[str, Tensor] = {}
        # Outputs of all positions exclude a prompt's; selected positions are already counted.
        hidden = whole if read is not None else whole[:, self.inserted :]
        if "hidden" in outputs:
            found["hidden"] = hidden
        for extra in self.extras:
            found |= extra.answer(self, HeadInput(inputs, outputs, whole, hidden, matrix))
        for name in outputs & {self.config.predicts, *self.config.causal_outputs}:
            if read is None and inputs.predicted is not None:
                hidden = take(whole, self.pooled(inputs.predicted))
            elif read is not None and "first" in self._positions(outputs):
                hidden = hidden[:, 1:]
            found |= self.answer(name, self.head, inputs, hidden, matrix, dropout_key)
        return found

    def _fitted(self, hidden: Tensor) -> Tensor:
        for extra in self.extras:
            hidden = extra.compared(hidden)
        return hidden

    def _keys(self, key: Tensor | None) -> _Keys:
        if not self.training or key is None:
            return _Keys()
        sites, layers = len(self.config.dropout_sites), len(self.layers)
        keys = split_key(key, 2 + sites * layers)
        return _Keys(keys[0], keys[1:-1].view(layers, sites, -1), keys[-1])

    def _embed(
        self, inputs: Inputs, dropout_key: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Embeds prompt and text.

        Returns:
            Embeddings [B, n + S, D], the token embeddings [V, E], and the segments and prefix of
            prompt and text [B, n + S].
        """
        # Text comes after a prefix or prompt, so its positions are shifted by their length.
        positions = inputs.positions
        if positions is not None:
            positions = positions + self.config.virtual_tokens
        # Embeddings of other packages need not take noise.
        noise = {} if inputs.noise is None else {"noise": inputs.noise}
        hidden, matrix = self.embeddings(
            inputs.tokens, positions, inputs.token_types, dropout_key, self.prompt, **noise
        )
        return hidden, matrix, self.with_prompt(inputs.segments), self.with_prompt(inputs.prefix)

    @property
    def _has_prefix(self) -> bool:
        return self.config.virtual_tokens > self.inserted

    def _visible(
        self,
        tokens: Tensor,
        segments: Tensor | None,
        prefix: Tensor | None,
        causal: bool,
        fuses: bool,
    ) -> tuple[Context, Tensor | None]:
        """A context that says which positions attend to which, and the relative bias."""
        if fuses:
            bias, length = None, tokens.shape[1]
            if self.relative_bias is not None:
                bias = self.relative_bias.by_distance(length, length)
            return Context(fused=Mask(segments, causal=causal, prefix=prefix), causal=causal), bias
        mask, bias = self._mask(tokens, segments, prefix, causal)
        # Segments are equivalent to the mask unless there is a prefix or a bias.
        alone = prefix is None and bias is None and not self._has_prefix
        return Context(mask=mask, causal=causal, segments=segments if alone else None), bias

    def _mask(
        self, tokens: Tensor, segments: Tensor | None, prefix: Tensor | None, causal: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """The attention mask, or the relative bias, which contains the mask.

        The mask is None if nothing is masked, or only later positions in a causal model.
        """
        # A prefix without segments: all positions are one sequence.
        if segments is None and prefix is not None:
            segments = torch.ones_like(tokens)
        mask = None if segments is None else segment_mask(segments, causal, prefix)
        if self.relative_bias is None:
            return mask, None
        # Without a mask the kernel applies the direction itself; a bias has to contain it.
        if mask is None and causal:
            mask = causal_mask(tokens)
        length = tokens.shape[1]
        return None, self.relative_bias(length, length, mask)

    def _finish(
        self, hidden: Tensor, dropout_key: Tensor | None = None, positions: Tensor | None = None
    ) -> Tensor:
        """Applies the final norm and dropout."""
        if self.final_norm is not None:
            hidden = self.final_norm(hidden)
        if not self.config.final_dropout:
            return hidden
        return dropout(hidden, self.config.dropout, dropout_key, positions)

    def _shown(self, hidden: Tensor, number: int) -> Tensor:
        """The output `layer.number`: without a prompt's positions, the last with the final norm."""
        if self.final_norm is not None and number == len(self.layers):
            hidden = self.final_norm(hidden)
        return hidden[:, self.inserted :]

    @torch.no_grad()
    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        """Processes the prompts of a causal model.

        Args:
            inputs: tokens, padded at the left; segments, 0 for padding, else 1; and a prefix.
            capacity: of the cache in positions, S included; at most `max_sequence_length` of them
                hold text.

        Returns:
            The logits [B, V] of the next tokens, and the cache for `step`.
        """
        assert inputs.segments is not None, "padding is marked by segments"
        # Segments 0 0 1 1 1 (two positions of padding) give positions 0 0 0 1 2.
        positions = (inputs.segments.cumsum(1) - 1).clamp(min=0)
        given = Inputs(inputs.tokens, inputs.segments, positions, prefix=inputs.prefix)
        hidden, matrix, segments, prefix = self._embed(given)
        assert segments is not None
        positions = self.positions(given)
        if self.prompt is not None:
            # Padding moves before the prompt, so that nothing separates the prompt from its text:
            # segments 1 1 | 0 0 1 1 1 become 0 0 1 1 1 1 1.
            order = (segments > 0).int().argsort(dim=1, stable=True)
            hidden = take(hidden, order)
            segments, positions = segments.gather(1, order), positions.gather(1, order)
            prefix = None if prefix is None else prefix.gather(1, order)
        from trainer.models.cache import Cache

        cache = Cache(len(self.layers), capacity + self.inserted, segments > 0)
        mask, bias = self._mask(segments, segments, prefix, self.config.causal)
        return self._decode(hidden, matrix, positions, mask, bias, cache), cache

    @torch.no_grad()
    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        """Processes one token per row: int [B] -> the logits [B, V] of the next ones."""
        mask, bias = cache.mask(), None
        if self.relative_bias is not None:
            bias = self.relative_bias(1, cache.length + 1, mask, before=cache.length)
        positions = cache.positions()[:, None]
        # The table has places for a prefix, too.
        shifted = positions + self.config.virtual_tokens - self.inserted
        hidden, matrix = self.embeddings(tokens[:, None], shifted)
        return self._decode(hidden, matrix, positions, mask, bias, cache)

    def _decode(
        self,
        hidden: Tensor,
        matrix: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        bias: Tensor | None,
        cache: Cache,
    ) -> Tensor:
        # Prompts are padded at the left, so every row ends at the same index.
        last = torch.full((len(hidden), 1), hidden.shape[1] - 1, device=hidden.device)
        config = self.config
        columns = config.position_columns(positions) if config.reads_positions else {}
        context = Context(mask=mask, causal=config.causal, columns=columns)
        hidden = self.layers.run(hidden, None, bias, context, last, cache)
        logits: Tensor = self.head(self._finish(hidden), matrix)[:, 0]
        return logits

    @property
    def max_sequence_length(self) -> int:
        """Maximum sequence length of the position table, in tokens."""
        rows = self.config.max_positions
        return sys.maxsize if rows is None else rows - self.config.virtual_tokens

    def flops_per_token(self, sequence_length: int, predicted_per_token: float = 1.0) -> float:
        """FLOPs per position (Chowdhery et al. 2022, appendix B).

        6 per weight of a layer (see `matrix_flops`), and 12 S H K per layer for attention: scores
        and mixing, masked positions included. The head, and the last layer after attention, count
        for predicted positions only. A prompt's positions count only as keys. Recomputation does
        not count.
        """
        # The last layer still needs queries, keys and values of all positions.
        # Layer by layer: a layer that is used several times computes each time.
        matrices = sum(matrix_flops(layer) for layer in self.layers)
        for_predicted = matrix_flops(self.layers[-1], without="qkv")
        positions = sequence_length + self.config.virtual_tokens
        attention = 12 * len(self.layers) * positions * self.config.heads * self.config.head_width
        # LSTM layers below the head need the last layer at all positions.
        if below := sum(matrix_flops(each) for each in self.extras if each.is_below_head):
            matrices += below
            for_predicted = 0
        predicted = predicted_per_token * (for_predicted + self.head_flops())
        return self.embedding_flops() + matrices - for_predicted + attention + predicted
