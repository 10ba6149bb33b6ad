"""Labels of a decoder's classifier are those of `transformers`, whatever the tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    BertForSequenceClassification,
    GPT2Config,
    GPT2ForSequenceClassification,
)

from data_pipeline.building import task_rows
from samestep.examples import TaskRow
from tests.parity import folders
from trainer.inference.label import Labeler

WORDS = ("the", "dog", "cat", "runs", "sleeps", "here", "good")
BART = BartConfig(
    vocab_size=16,
    d_model=16,
    encoder_layers=1,
    decoder_layers=1,
    encoder_attention_heads=2,
    decoder_attention_heads=2,
    encoder_ffn_dim=24,
    decoder_ffn_dim=24,
    max_position_embeddings=32,
    num_labels=3,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
    decoder_start_token_id=3,
)
GPT2 = GPT2Config(
    vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=32, num_labels=3, pad_token_id=0
)
BERT = folders.tiny_bert(num_labels=3)


@pytest.mark.parametrize(
    ("kind", "config", "pooled"),
    [
        (BartForSequenceClassification, BART, "last"),
        (GPT2ForSequenceClassification, GPT2, "last"),
        (BertForSequenceClassification, BERT, "first"),
    ],
    ids=["bart", "gpt2", "bert"],
)
@torch.no_grad()
def test_rows_are_pooled_where_the_model_pools(
    kind: Any, config: Any, pooled: str, tmp_path: Path
) -> None:
    """The tokenizer has [CLS], as BART's has <s>."""
    model = kind(config).eval()
    folders.save(model, tmp_path, WORDS)
    labeler = Labeler(str(tmp_path))
    assert labeler.objective.pooled == pooled
    texts = ["the dog runs", "cat sleeps here good the dog", "good"]
    rows = [TaskRow((text,), 0.0) for text in texts]
    found = labeler(task_rows.encode(rows, labeler.tokenizer, "classification"), 1000)
    ids = {word: number for number, word in enumerate((*folders.SPECIAL, *WORDS))}
    for text, own in zip(texts, found, strict=True):
        tokens = torch.tensor([[2, *(ids[word] for word in text.split()), 3]])
        expected = model(tokens).logits.softmax(-1)[0]
        np.testing.assert_allclose(own, expected.numpy(), atol=1e-5)
