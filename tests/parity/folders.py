"""Folders of tiny random models of `transformers`, with a vocabulary of whole words."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from transformers import BertConfig, PreTrainedModel

from tests.outputs import fill, random_parameters

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def tiny_bert(**settings: object) -> BertConfig:
    """One layer, 16 tokens and 32 positions."""
    return BertConfig(
        vocab_size=16,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=24,
        max_position_embeddings=32,
        **settings,
    )


def save(
    model: PreTrainedModel, folder: Path, words: Sequence[str], scale: float = 1.0, **tokenizer: str
) -> None:
    """Gives a model random weights, and saves it with a tokenizer of BERT in lower case.

    Args:
        scale: of the weights.
        tokenizer: further settings of tokenizer_config.json.
    """
    values = random_parameters(model)
    fill(model, {name: scale * value for name, value in values.items()})
    model.save_pretrained(folder)
    (folder / "vocab.txt").write_text("\n".join((*SPECIAL, *words)) + "\n")
    settings = {"do_lower_case": True} | tokenizer
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
