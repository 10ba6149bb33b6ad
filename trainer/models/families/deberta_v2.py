"""DeBERTa versions 2 and 3 (He et al. 2021; He et al. 2023, arXiv 2111.09543)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import nn

from samestep.errors import ConfigError
from trainer.models.families import deberta
from trainer.models.layers.disentangled import ConvolutionLayer, DisentangledAttention


@dataclass(frozen=True)
class Config(deberta.Config):
    """DeBERTa-v3-base; v2 has a convolution in the first layer.

    Positions are projected with the matrices of contents, relative embeddings are normalized, and
    far distances share them.

    Attributes:
        position_buckets: half of the number of relative embeddings. Distances below half of it have
            one each; farther ones, up to `max_positions`, share the rest.
        conv_width: number of neighboring positions in the convolution that is added to the first
            layer's output, odd; 0: no convolution.
        conv_activation: the activation after it.
    """

    codec: ClassVar[str] = "trainer.models.codecs.deberta_v2"

    vocab_size: int = 128100
    position_buckets: int = 256
    conv_width: int = 0
    conv_activation: Literal["tanh", "gelu"] = "tanh"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 4 <= self.position_buckets < 2 * self.max_positions - 2:
            raise ConfigError(
                f"position_buckets is {self.position_buckets}. Use 4 or more, and less than twice "
                f"max_positions, {self.max_positions}, as 256 for 512."
            )
        if self.conv_width < 0 or (self.conv_width and self.conv_width % 2 == 0):
            raise ConfigError(f"conv_width is {self.conv_width}. Use an odd number, or 0 for none.")

    @property
    def buckets(self) -> int:
        return self.position_buckets

    @property
    def normalizes_places(self) -> bool:
        return True

    @property
    def dropout_sites(self) -> tuple[str, ...]:
        own = ("convolution",) if self.conv_width else ()
        return (*super().dropout_sites, *own)

    def static(self, index: int) -> tuple[bool, ...]:
        return (*super().static(index), self._convolves(index))

    def _convolves(self, index: int) -> bool:
        return index == 0 and self.conv_width > 0

    def build_layer(self, index: int, cross_attention: bool = False) -> nn.Module:
        if self._convolves(index):
            return ConvolutionLayer(self, index, self.conv_width, self.conv_activation)
        return super().build_layer(index)

    def build_attention(self, index: int) -> nn.Module:
        return DisentangledAttention(self)
