"""The tokenizer of an exported model: it gives `transformers` the rows that the model was trained on."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from trainer.examples import Vocabulary
from trainer.models import ModelConfig

PADDING = "<|pad|>"
_MODEL, _SETTINGS, _NAMES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"


def adapt(folder: Path, config: ModelConfig, vocabulary: Vocabulary) -> int | None:
    """Changes the files of a tokenizer, as `Tokenizer.save` writes them, to fit a model.

    - Of a model with token types, it tells the texts of a pair apart by them.
    - Of a decoder with a task's head, it puts the special tokens where `objectives.task_rows.TaskRows` has them, and
      gets a token of its own for padding where it has none: `transformers` looks for the last token that is not it.

    Args:
        folder: with the files; one with a SentencePiece model has all that is needed.
        config: of the model.
        vocabulary: of the tokenizer.

    Returns:
        The id of the token for padding; None where there is none.
    """
    pad = vocabulary.pad
    if not (folder / _MODEL).is_file():
        return pad
    settings = json.loads((folder / _SETTINGS).read_text(encoding="utf-8"))
    if config.type_vocab > 1:
        settings.setdefault("model_input_names", ["input_ids", "token_type_ids", "attention_mask"])
    if _reads_last(config):
        backend = tokenizers.Tokenizer.from_file(str(folder / _MODEL))
        backend.post_processor = _template(backend, vocabulary)
        if pad is None:
            backend.add_special_tokens([PADDING])
            pad = backend.token_to_id(PADDING)
            settings["pad_token"] = PADDING
            names = json.loads((folder / _NAMES).read_text(encoding="utf-8"))
            (folder / _NAMES).write_text(
                json.dumps(names | {"pad_token": PADDING}, indent=2), encoding="utf-8"
            )
        backend.save(str(folder / _MODEL))
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return pad


def _reads_last(config: ModelConfig) -> bool:
    """Whether a model has a task's head that reads the last token of a decoder."""
    return config.head != "language_model" and config.causal


def _template(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> TemplateProcessing:
    begin, end = vocabulary.cls, vocabulary.end
    assert end is not None, (
        "the model was trained with a tokenizer that has a token to end texts with"
    )
    tokens = [end] if begin in (None, end) else [begin, end]
    names = [backend.id_to_token(token) for token in tokens]
    before, after = " ".join(f"{name}:0" for name in names[:-1]), names[-1]
    return TemplateProcessing(
        single=f"{before} $A:0 {after}:0".strip(),
        pair=f"{before} $A:0 {after}:0 $B:0 {after}:0".strip(),
        special_tokens=list(zip(names, tokens, strict=True)),
    )
