"""Attention of a text in models with a prompt or prefix before it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.outputs import outputs, random_parameters
from trainer.checkpoint.layout import StoredTensors
from trainer.inference.hidden_states import TextEncoder
from trainer.models.families import bert, gpt2
from trainer.models.peft.kinds import prefix, prompt
from trainer.training.weights.loading import Weights

SHAPE: dict[str, Any] = {"vocab_size": 32, "layers": 2, "width": 16, "heads": 2, "ffn_width": 24}


@pytest.mark.parametrize("family", [bert, gpt2], ids=["bert", "gpt2"])
@pytest.mark.parametrize("added", [prompt.Config(3), prefix.Config(3)], ids=["prompt", "prefix"])
def test_attention_is_that_of_the_text(family: Any, added: Any, tokenizer_folder: Path) -> None:
    """Its share of the softmax over the text and what comes before."""
    config = family.Config(**SHAPE, max_positions=16, peft=added)
    parameters = random_parameters(config.build())
    weights = Weights(config, StoredTensors.of(parameters), tokenizer_folder, tokenizer_folder)
    texts = [np.array([2, 5, 6, 7, 3]), np.array([2, 8, 3])]
    found = TextEncoder(weights).attention(texts, [1, 2])
    assert found.shape == (2, 2, 2, 5, 5)
    assert not found[1, :, :, 3:].any()
    assert not found[1, :, :, :, 3:].any()
    own = found[1, :, :, :3, :3].sum(-1)
    assert own.max() < 0.99
    model = config.build().eval()
    model.load_state_dict(parameters)
    for text, attention in zip(texts, found, strict=True):
        tokens = torch.from_numpy(text)[None]
        places = torch.arange(len(text))[None]
        names = ("attention.1", "attention.2")
        for number, scores in enumerate(outputs(model, *names, tokens=tokens, positions=places)):
            before = scores.shape[3] - len(text)
            assert before == 3
            skipped = scores.shape[2] - len(text)
            expected = scores.softmax(-1)[0, :, skipped:, before:]
            size = len(text)
            torch.testing.assert_close(attention[number, :, :size, :size], expected)
