"""Exported encoders without a head give the hidden states of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import pytest
import torch
from transformers import AutoModel, T5EncoderModel

from samestep.config import Kinds, decode
from tests.outputs import outputs, parameters, published
from tests.unit.models.test_embedding_heads import ENCODERS, tree_of
from trainer.checkpoint.huggingface import save_folder
from trainer.models.config import ModelConfig
from trainer.training.weights.loading import load_weights


@pytest.mark.parametrize("kind", sorted({*ENCODERS} - {"neobert"}))  # transformers has no class
@torch.no_grad()
def test_transformers_loads_an_encoder_that_embeds(kind: str, tmp_path: Path) -> None:
    kinds = Annotated[ModelConfig, Kinds("trainer.models.families")]
    config = decode(kinds, tree_of(kind), "model")
    model, generator = config.build().eval(), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    save_folder(tmp_path, *published(config, parameters(model)))
    auto = T5EncoderModel if kind == "t5" else AutoModel
    theirs, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert all("pooler" in name for name in report["missing_keys"])
    assert not report["unexpected_keys"]
    tokens = torch.arange(5, 25).view(2, 10)
    segments = torch.ones_like(tokens)
    columns = {
        "tokens": tokens,
        "segments": segments,
        "positions": torch.arange(10).expand(2, -1),
    }
    (found,) = outputs(model, "embedding", **columns)
    expected = theirs.eval()(input_ids=tokens, attention_mask=segments).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    again = load_weights(tmp_path)
    (found,) = outputs(again.model(), "embedding", **columns)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
