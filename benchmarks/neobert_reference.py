"""NeoBERT as its authors publish it, for comparison: `transformers` has no class of it.

Written from Le Breton et al. 2025 (arXiv 2502.19587, section 3) and the `model.py` beside the
released weights (chandar-lab/NeoBERT on the Hugging Face Hub), whose names of parameters, rows of
`qkv` by head, and rotation of neighboring features as complex numbers it keeps.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPE: dict[str, Any] = {
    "model_type": "neobert",
    "vocab_size": 60,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 60,
    "max_length": 64,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
}
RELEASED: dict[str, Any] = {
    **SHAPE,
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_length": 4096,
}


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Multiplies neighboring features of [B, S, H, K], as complex numbers, by exp(i angle)."""
    width = x.shape[-1]
    frequencies = 1.0 / 10_000.0 ** (torch.arange(0, width, 2).float() / width)
    angles = positions[..., None].float() * frequencies
    turns = torch.polar(torch.ones_like(angles), angles)[:, :, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


class GatedUnit(nn.Module):
    """w3(silu(w1 x) * (w2 x)), with w1 and w2 in one matrix."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.w12 = nn.Linear(width, 2 * inner, bias=False)
        self.w3 = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w12(x).chunk(2, -1)
        out: Tensor = self.w3(F.silu(gate) * value)
        return out


class Block(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        width, eps = config["hidden_size"], config["norm_eps"]
        self.heads = config["num_attention_heads"]
        # Two thirds of the setting, rounded up to a multiple of 8.
        inner = 8 * ((int(2 * config["intermediate_size"] / 3) + 7) // 8)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.wo = nn.Linear(width, width, bias=False)
        self.ffn = GatedUnit(width, inner)
        self.attention_norm = nn.RMSNorm(width, eps)
        self.ffn_norm = nn.RMSNorm(width, eps)

    def forward(self, x: Tensor, positions: Tensor, allowed: Tensor | None) -> Tensor:
        batch, length, width = x.shape
        of_heads = self.qkv(self.attention_norm(x)).view(batch, length, self.heads, -1)
        query, key, value = of_heads.chunk(3, -1)
        query, key = rotated(query, positions), rotated(key, positions)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed)
        x = x + self.wo(mixed.transpose(1, 2).reshape(batch, length, width))
        out: Tensor = x + self.ffn(self.ffn_norm(x))
        return out


class Encoder(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.encoder = nn.Embedding(config["vocab_size"], config["hidden_size"], padding_idx=0)
        self.transformer_encoder = nn.ModuleList(
            Block(config) for _ in range(config["num_hidden_layers"])
        )
        self.layer_norm = nn.RMSNorm(config["hidden_size"], config["norm_eps"])

    def forward(self, tokens: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        """[B, S, D]; attention stays within segments, as in its packed rows."""
        allowed = None
        if segments is not None:
            allowed = segments[:, None, :, None] == segments[:, None, None, :]
        x = self.encoder(tokens)
        for block in self.transformer_encoder:
            x = block(x, positions, allowed)
        out: Tensor = self.layer_norm(x)
        return out


class MaskedLM(nn.Module):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.model = Encoder(config)
        self.decoder = nn.Linear(config["hidden_size"], config["vocab_size"])

    def forward(self, tokens: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        logits: Tensor = self.decoder(self.model(tokens, segments, positions))
        return logits


class SequenceClassification(nn.Module):
    """Logits [B, C] of the first position: dense, tanh, classifier (dropout is off here)."""

    def __init__(self, config: dict[str, Any], labels: int) -> None:
        super().__init__()
        self.model = Encoder(config)
        self.dense = nn.Linear(config["hidden_size"], config["hidden_size"])
        self.classifier = nn.Linear(config["hidden_size"], labels)

    def forward(self, tokens: Tensor, segments: Tensor | None, positions: Tensor) -> Tensor:
        first = self.model(tokens, segments, positions)[:, 0]
        logits: Tensor = self.classifier(self.dense(first).tanh())
        return logits
