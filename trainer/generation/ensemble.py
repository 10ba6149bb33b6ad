"""An ensemble of models that generates text: the logits of its members are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from trainer.errors import ConfigError
from trainer.generation.generates import Generates
from trainer.models import Model
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
        members: models with the same tokenizer; all with an encoder, or none.

    Raises:
        ConfigError: a member generates no text, or some read a source and others a prompt.
    """

    def __init__(self, members: Sequence[Model]) -> None:
        super().__init__()
        self.members: Sequence[Generates] = nn.ModuleList(members)  # type: ignore[assignment]
        if not all(isinstance(member, Generates) for member in members):
            raise ConfigError("a model of the ensemble writes no text. Use t5, bart or gpt2.")
        self.config = members[0].config
        if any(each.config.encoder_decoder != self.config.encoder_decoder for each in members):
            raise ConfigError(
                "encoder-decoders and decoders cannot be combined. Name runs of one kind with "
                "--ensemble."
            )
        self.max_sequence_length = min(member.max_sequence_length for member in members)

    def start(self, inputs: Inputs, capacity: int) -> tuple[Tensor, Cache]:
        started = [member.start(inputs, capacity) for member in self.members]
        return _mean([logits for logits, _ in started]), _Caches([cache for _, cache in started])

    def step(self, tokens: Tensor, cache: Cache) -> Tensor:
        assert isinstance(cache, _Caches)
        pairs = zip(self.members, cache.members, strict=True)
        return _mean([member.step(tokens, each) for member, each in pairs])


def _mean(logits: Sequence[Tensor]) -> Tensor:
    """[B, V] of each member, which may have other rows of padding in its table."""
    smallest = min(each.shape[1] for each in logits)
    return torch.stack([each[:, :smallest].float() for each in logits]).mean(0)
