"""An ensemble of models that generates text: the logits of its members are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.generation.generates import Generates
from trainer.models import Model, ModelConfig
from trainer.models.cache import Cache
from trainer.models.inputs import Inputs


class _Caches(Cache):
    """The caches of the members."""

    def __init__(self, members: Sequence[Cache]) -> None:
        self.members = members

    def select(self, rows: Tensor, sources: Tensor | slice | None = None) -> None:
        for cache in self.members:
            cache.select(rows, sources)


class Ensemble(nn.Module):
    """Several models as one, for a generator; see `Generates`.

    Logits are averaged before the softmax, as for T5 (Raffel et al. 2020, section 3.6).

    Args:
        members: models with the same tokenizer, which read texts in the same way.

    Raises:
        ConfigError: a member generates no text, or one reads texts in another way.
    """

    def __init__(self, members: Sequence[Model]) -> None:
        super().__init__()
        self.members: Sequence[Generates] = nn.ModuleList(members)  # type: ignore[assignment]
        if not all(isinstance(member, Generates) for member in members):
            raise ConfigError("a model of the ensemble writes no text. Use t5, bart or gpt2.")
        self.config = members[0].config
        # They read the same inputs, with or without a prefix that is visible to all of it.
        if len({_direction(member.config) for member in members}) > 1:
            raise ConfigError(
                "the models of an ensemble read texts in different ways: encoder-decoders, "
                "decoders, decoders with a prefix, encoders. Name runs of one kind with --ensemble."
            )
        self.max_sequence_length = min(member.max_sequence_length for member in members)

    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        started = [member.start(inputs, capacity) for member in self.members]
        return _mean([logits for logits, _ in started]), _Caches([cache for _, cache in started])

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, _Caches)
        pairs = zip(self.members, cache.members, strict=True)
        return _mean([member.step(tokens, each) for member, each in pairs])


def _direction(config: ModelConfig) -> tuple[bool, bool, bool]:
    return config.encoder_decoder, config.causal, config.prefix_lm


def _mean(logits: Sequence[Tensor]) -> Tensor:
    """[B, V] of each member, which may have other rows of padding in its table."""
    smallest = min(each.shape[1] for each in logits)
    return torch.stack([each[:, :smallest].float() for each in logits]).mean(0)
