"""DeBERTa version 3: the encoder of version 2, pre-trained as ELECTRA (He et al. 2023).

Generator and discriminator share token embeddings, but their objectives pull these in opposite
directions: equal meanings together, and apart. The discriminator therefore adds a table of its own
to the generator's, and its gradients stop before the latter (arXiv 2111.09543, section 3.3).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Start, Stored
from trainer.models.config import Activation
from trainer.models.extras import Extra
from trainer.models.families import deberta_v2
from trainer.models.families.deberta import Deberta
from trainer.models.generator import FIRST, GENERATOR, ReplacedTokenHead, WithGenerator
from trainer.models.layers.embeddings import Embeddings
from trainer.models.transformer import Transformer

_TABLE = "embeddings.tokens.weight"


@dataclass(frozen=True)
class Config(deberta_v2.Config):
    """DeBERTa-v3-base; `generator_layers: 6` adds the generator for pre-training.

    Attributes:
        generator_layers: layers of the generator, which is as wide as the discriminator (half of
            its layers in the paper); 0: no generator.
    """

    codec: ClassVar[str] = "trainer.models.codecs.deberta_v3"
    generator_setting: ClassVar[str] = "generator_layers"

    generator_layers: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.generator_layers < 0:
            raise ConfigError(
                f"generator_layers is {self.generator_layers}. Use half of layers, as "
                f"{max(1, self.layers // 2)}, or 0 for no generator."
            )
        if self.mask_decoder and not self.generator_layers:
            raise ConfigError(
                "mask_decoder is true, but it is the generator's. Set generator_layers to "
                f"{max(1, self.layers // 2)}, or mask_decoder to false."
            )

    @property
    def head_activation(self) -> Activation:
        return self.activation

    @property
    def predicts(self) -> str:
        return "replaced" if self.head == "language_model" else super().predicts

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = {name: value for name, value in super().settings_for.items() if "head" in value}
        with_generator = dict.fromkeys(FIRST, f"model.generator_layers={max(1, self.layers // 2)}")
        return settings | with_generator | {"replaced": "model.head=language_model"}

    @property
    def generator(self) -> deberta_v2.Config:
        """The configuration of the generator."""
        own = {each.name: getattr(self, each.name) for each in fields(deberta_v2.Config)}
        return deberta_v2.Config(**{**own, "layers": self.generator_layers})

    def build_generator(self) -> Transformer | None:
        has_none = not self.generator_layers or self.head != "language_model"
        return None if has_none else self.generator.build_base()

    def build_base(self) -> Transformer:
        detects = self.head == "language_model"
        head = ReplacedTokenHead(self) if detects else self._build_head()
        return DebertaV3(self, head, self.build_extras())

    def initial_std(self, name: str) -> tuple[float, ...]:
        # The discriminator starts with the embeddings of the generator (section 3.3).
        disentangled = name == _TABLE and self.generator_layers > 0
        return (0.0,) if disentangled else super().initial_std(name)


class DisentangledEmbeddings(Embeddings):
    """Embeddings that add a table to another model's, which gets no gradient from them (eq. 5).

    Args:
        config: of the model.
        below: the table of the generator.
    """

    def __init__(self, config: Config, below: nn.Embedding) -> None:
        super().__init__(config)
        # In a tuple, since its owner is the generator.
        self._below = (below,)

    def look_up(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden, matrix = super().look_up(tokens)
        with torch.no_grad():
            # Not by the module: after its forward pass ZeRO-3 would free the table too early.
            below = F.embedding(tokens, self._below[0].weight)
        return hidden + below, matrix


class DebertaV3(WithGenerator, Deberta):
    """The discriminator, with a head for replaced tokens or for a task, and the generator."""

    config: Config

    def __init__(self, config: Config, head: nn.Module, extras: Sequence[Extra] = ()) -> None:
        super().__init__(config, head, extras)
        if self.generator is not None:
            assert isinstance(self.generator.embeddings, Embeddings)
            self.embeddings = DisentangledEmbeddings(config, self.generator.embeddings.tokens)

    def start_from(self, stored: Stored) -> Start:
        start, below = super().start_from(stored), GENERATOR + _TABLE
        if self.generator is not None or below not in stored.shapes:
            return start
        # Without the generator, both tables become one.
        return replace(start, added={_TABLE: below})
