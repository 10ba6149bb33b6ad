"""The head `embedding` of each encoder: hidden states, without parameters of its own."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import torch

from samestep.config import Kinds, decode
from trainer.models.config import ModelConfig
from trainer.models.inputs import Inputs

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "distilbert": {},
    "albert": {"embedding_width": 8},
    "electra": {"embedding_width": 8},
    "modernbert": {},
    "mpnet": {},
    "neobert": {},
    "deberta": {},
    "deberta_v2": {"position_buckets": 8},
    "deberta_v3": {"position_buckets": 8},
    "xlnet": {},
    "t5": {"head_width": 8},
    "llama": {"head_width": 8, "kv_heads": 1, "causal": False},
}
SHAPE = {"vocab_size": 40, "layers": 2, "width": 16, "heads": 2, "ffn_width": 32}


def tree_of(kind: str) -> dict[str, Any]:
    positions = {} if kind == "t5" else {"max_positions": 32}
    return {"kind": kind, **SHAPE, **positions, "head": "embedding", **ENCODERS[kind]}


@pytest.mark.parametrize("kind", ENCODERS)
def test_embeddings_have_the_models_width(kind: str) -> None:
    kinds = Annotated[ModelConfig, Kinds("trainer.models.families")]
    model = decode(kinds, tree_of(kind), "model").build().eval()
    for name, parameter in model.named_parameters():
        values = model.initial_values(name, 0, parameter.numel(), seed=1)
        parameter.data.copy_(values.view(parameter.shape))
    tokens = torch.arange(5, 25, dtype=torch.int32).view(2, 10)
    segments = torch.ones_like(tokens)
    positions = torch.arange(10, dtype=torch.int32).expand(2, -1)
    (found,) = model(Inputs(tokens, segments, positions), frozenset({"embedding"})).values()
    assert found.shape == (2, 10, 16)
    assert found.std() > 0
