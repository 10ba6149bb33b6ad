"""`samestep fill`: the likeliest words for the masks in a text."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from rich.console import Console
from rich.table import Table

from data_pipeline.tokenizers.tokenizer import Tokenizer
from trainer.errors import ConfigError
from trainer.models import Inputs
from trainer.training.weights import load_weights


def fill(checkpoint: str, texts: Sequence[str], top: int) -> None:
    """Prints the likeliest words for each masked place of each text."""
    weights = load_weights(checkpoint)
    head = weights.config.head
    if head != "language_model":
        raise ConfigError(
            f"{checkpoint} holds a model with a {head} head, which predicts no words and fills no masks; use the model "
            "that it was fine-tuned from, or samestep evaluate for what it does predict"
        )
    if weights.config.causal or weights.config.encoder_decoder:
        raise ConfigError(
            f"{checkpoint} holds a model that writes text from left to right and fills no masks; use samestep generate"
        )
    with weights.tokenizer_files() as folder:
        tokenizer = Tokenizer.load(folder)
    model = weights.model(frozenset({"tokens"}))
    console = Console(highlight=False)
    for text in texts:
        tokens, masked = _encode(tokenizer, text)
        if len(tokens) > model.max_sequence_length:
            raise ConfigError(
                f"the text has {len(tokens)} tokens and the model takes {model.max_sequence_length}; shorten it"
            )
        row = torch.tensor([tokens])
        with torch.no_grad():
            inputs = Inputs(
                tokens=row,
                segments=torch.ones_like(row),
                positions=torch.arange(row.shape[1])[None],
                predicted=torch.tensor([masked]),
            )
            logits = model(inputs, frozenset({"tokens"}))["tokens"]
        table = Table("probability", "token", "text", title=text, title_justify="left")
        for place in logits[0].float().softmax(-1):
            for probability, token in zip(
                *(found.tolist() for found in place.topk(top)), strict=True
            ):
                filled = tokens.copy()
                filled[masked[0]] = token
                words = tokenizer.decode(filled[1:-1]) if len(masked) == 1 else ""
                table.add_row(f"{probability:.3f}", tokenizer.decode([token]).strip(), words)
            table.add_section()
        console.print(table)


def _encode(tokenizer: Tokenizer, text: str) -> tuple[list[int], list[int]]:
    """The tokens of a text with its special tokens, and the places of its masks."""
    vocabulary = tokenizer.vocabulary
    if vocabulary.mask is None or vocabulary.cls is None or vocabulary.sep is None:
        raise ConfigError(
            "this tokenizer has no mask token, so its model fills no masks; use a BERT or RoBERTa model"
        )
    # Either spelling is taken. A mask takes the space before it, as it does in RoBERTa's vocabulary.
    parts = text.replace("<mask>", "[MASK]").split("[MASK]")
    if len(parts) < 2:
        raise ConfigError(f"nothing to fill in {text!r}; put [MASK] where a word is missing")
    tokens, masked = [vocabulary.cls], []
    for number, ids in enumerate(
        tokenizer.encode_batch([*(part.rstrip() for part in parts[:-1]), parts[-1]])
    ):
        if number:
            masked.append(len(tokens))
            tokens.append(vocabulary.mask)
        tokens.extend(ids.tolist())
    return [*tokens, vocabulary.sep], masked
