"""ELECTRA (Clark et al. 2020, arXiv 2003.10555): a discriminator, and a small generator beside it.

The generator predicts masked tokens. Samples from it replace them, and the discriminator says for
each token whether it was replaced. Both are one module, with shared embeddings. Fine-tuning, export
and features use the discriminator, whose parameters have the names of a BERT; the generator's begin
with "generator.".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from torch import Tensor, nn

from samestep.errors import ConfigError
from trainer.models import Outputs, Start, Stored
from trainer.models.config import Activation, Pooling
from trainer.models.families import bert
from trainer.models.generator import (
    FIRST,
    GENERATOR,
    Discriminator,
    ReplacedTokenHead,
    WithGenerator,
)
from trainer.models.heads import MaskedLMHead
from trainer.models.inputs import Inputs
from trainer.models.layers.embeddings import Embeddings
from trainer.models.transformer import Transformer

MainHead: TypeAlias = Literal["detector", "tokens", "tokens_or_copy"]


@dataclass(frozen=True)
class Config(bert.Config):
    """ELECTRA-small; `generator_divisor: 4` adds the generator for pre-training.

    Attributes:
        embedding_width: E, of the embeddings, which are projected to `width` if it differs.
        generator_divisor: the generator's width, heads and feed-forward width are this number of
            times smaller (3 or 4 in the paper; 1 for the same size); 0: no generator.
        share_embeddings: whether the generator uses the discriminator's embeddings.
        masked_lm: a generator alone: predicts masked tokens instead of replaced ones.
        main_head: what the model beside the generator predicts: `detector`, whether a token was
            replaced; `tokens`, the original token, and `tokens_or_copy`, also whether to copy the
            token that is there ("Replace MLM" and "All-Tokens MLM" in section 3.4 of the paper).
    """

    codec: ClassVar[str] = "trainer.models.codecs.electra"
    pooler_activation: ClassVar[Pooling] = "gelu"
    generator_setting: ClassVar[str] = "generator_divisor"
    classification_drops_first: ClassVar[bool] = True

    width: int = 256
    heads: int = 4
    ffn_width: int = 1024
    embedding_width: int = 128
    generator_divisor: int = 0
    share_embeddings: bool = True
    masked_lm: bool = False
    main_head: MainHead = "detector"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_positive("embedding_width")
        for name in ("nsp", "span_boundary", "causal", "also_causal", "teacher_width"):
            if getattr(self, name):
                raise ConfigError(f"{name} is set, but ELECTRA has no such head. Use kind: bert.")
        divisor = self.generator_divisor
        if divisor < 0:
            raise ConfigError(f"generator_divisor is {divisor}. Use 0 for none, or 1 or more.")
        if not divisor:
            return
        if self.masked_lm:
            raise ConfigError(
                f"generator_divisor is {divisor}, but masked_lm makes this model a generator. Set "
                "masked_lm to false, or generator_divisor to 0."
            )
        for name in ("heads", "width", "ffn_width"):
            if getattr(self, name) % divisor:
                raise ConfigError(
                    f"generator_divisor {divisor} does not divide {name} {getattr(self, name)}. "
                    "Use a divisor of heads, width and ffn_width, such as 4."
                )

    @property
    def head_activation(self) -> Activation:
        return "gelu"

    @property
    def predicts(self) -> str:
        own = self.head == "language_model" and not self.masked_lm
        if not own:
            return super().predicts
        return "replaced" if self.main_head == "detector" else "original"

    @property
    def settings_for(self) -> Mapping[str, str]:
        settings = {name: value for name, value in super().settings_for.items() if "head" in value}
        with_generator = dict.fromkeys(FIRST, "model.generator_divisor=4")
        own = {
            "replaced": "model.head=language_model",
            "original": "model.main_head=tokens",
            "copied": "model.main_head=tokens_or_copy",
        }
        if self.head == "language_model":
            own["replaced"] = "model.main_head=detector"
        return settings | with_generator | own

    @property
    def generator(self) -> Config:
        """The configuration of the generator."""
        divisor = self.generator_divisor
        return replace(
            self,
            width=self.width // divisor,
            heads=self.heads // divisor,
            ffn_width=self.ffn_width // divisor,
            generator_divisor=0,
            masked_lm=True,
        )

    def build_generator(self) -> Transformer | None:
        if not self.generator_divisor:
            return None
        return Discriminator(self.generator, MaskedLMHead(self.generator, "gelu"))

    def build_base(self) -> Transformer:
        if self.head == "language_model" and not self.masked_lm:
            return Electra(self)
        # A generator alone, or a discriminator that is fine-tuned: one model, as BERT.
        return Discriminator(self, self._build_head(), self.build_extras())


class Electra(WithGenerator):
    """The discriminator, and in pre-training the generator.

    Attributes:
        copy_head: None unless `main_head` is `tokens_or_copy`.
    """

    config: Config
    head_parts = ("head", "copy_head")

    def __init__(self, config: Config) -> None:
        detects = config.main_head == "detector"
        super().__init__(
            config, ReplacedTokenHead(config) if detects else MaskedLMHead(config, "gelu")
        )
        self.copy_head: nn.Module | None = None
        if config.main_head == "tokens_or_copy":
            # After the generator: parameters keep their order in checkpoints.
            self.copy_head = nn.Linear(config.width, 1)
            self.offers |= {"copied"}
            self.trains = {**self.trains, "copied": "model.main_head=tokens"}
        if self.generator is not None and config.share_embeddings:
            assert isinstance(self.embeddings, Embeddings)
            self.generator.embeddings = Embeddings(config.generator, shared=self.embeddings)

    def main(self, inputs: Inputs, outputs: Outputs) -> dict[str, Tensor]:
        if "copied" not in outputs:
            return super().main(inputs, outputs)
        assert self.copy_head is not None
        # The choice to copy is made at every position, from the same states.
        found = super().main(inputs, outputs - {"copied"} | {"hidden"})
        return found | {"copied": self.copy_head(found["hidden"])[..., 0]}

    def start_from(self, stored: Stored) -> Start:
        start = super().start_from(stored)
        before = stored.config
        if self.generator is None or not (isinstance(before, Config) and before.masked_lm):
            return start
        # Two-stage training: both models start from a generator (section 3.4 of the paper).
        sources = dict(start.sources)
        for name in sources:
            if name.startswith(GENERATOR):
                sources[name] = name.removeprefix(GENERATOR)
        # The detector's head is another than the generator's, though some names are equal.
        new = self.head if self.config.main_head == "detector" else self.copy_head
        own = "head." if new is self.head else "copy_head."
        names = () if new is None else [name for name, _ in new.named_parameters()]
        sources |= {f"{own}{name}": None for name in names}
        unused = {name for name in stored.shapes if name not in sources.values()}
        return replace(start, sources=sources, unused=start.unused | unused)
