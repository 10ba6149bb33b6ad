"""Attention of each layer and head, against what transformers returns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AlbertConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    BertConfig,
    DebertaV2Config,
    ElectraConfig,
    GPT2Config,
    ModernBertConfig,
    MPNetConfig,
    PreTrainedConfig,
    RobertaConfig,
)

from tests.outputs import fill, outputs
from trainer.training.weights.loading import load_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 66,
}
CONFIGS: dict[str, PreTrainedConfig] = {
    "bert": BertConfig(**SHAPE),
    "roberta": RobertaConfig(**SHAPE),
    "albert": AlbertConfig(**SHAPE, embedding_size=16),
    "electra": ElectraConfig(**SHAPE, embedding_size=16),
    "deberta v2": DebertaV2Config(
        **SHAPE,
        relative_attention=True,
        position_biased_input=False,
        pos_att_type=["c2p", "p2c"],
        position_buckets=8,
        share_att_key=True,
        norm_rel_ebd="layer_norm",
    ),
    "modernbert": ModernBertConfig(**SHAPE, local_attention=8, pad_token_id=0),
    "mpnet": MPNetConfig(**SHAPE),
    "gpt2": GPT2Config(vocab_size=100, n_embd=32, n_layer=3, n_head=4, n_positions=64),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_probabilities_are_equal(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM if name == "gpt2" else AutoModelForMaskedLM
    theirs = auto.from_config(CONFIGS[name], attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    theirs.save_pretrained(tmp_path)
    weights = load_weights(tmp_path)
    ours = weights.config.build().eval()
    fill(ours, weights.tensors)
    tokens = torch.randint(4, 100, (3, 20))
    real = torch.arange(20) < torch.tensor([20, 13, 5])[:, None]
    found = outputs(
        ours,
        *(f"attention.{number}" for number in (1, 2, 3)),
        tokens=tokens,
        segments=real.int(),
        positions=torch.arange(20).expand(3, -1),
    )
    expected = theirs(tokens, attention_mask=real.int(), output_attentions=True).attentions
    for mine, other in zip(found, expected, strict=True):
        used = real[:, None, :, None].expand_as(other)
        torch.testing.assert_close(mine.softmax(-1)[used], other[used], rtol=1e-5, atol=1e-6)
