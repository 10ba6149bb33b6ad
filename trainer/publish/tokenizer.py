"""Adapts the tokenizer of an exported model, so that `transformers` feeds it as in training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers.processors import TemplateProcessing

from data_pipeline.tokenizers.sentencepiece import T5_CLASSES
from samestep.config import Tree
from samestep.errors import DataError
from samestep.examples import Vocabulary
from samestep.stored_json import damage_of, read_json
from trainer.models import ModelConfig
from trainer.publish import fast_tokenizer

PADDING = "<|pad|>"
_MODEL, _SETTINGS, _NAMES = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"


def adapt(
    folder: Path, config: ModelConfig, vocabulary: Vocabulary, generates_targets: bool
) -> int | None:
    """Adapts the files that `Tokenizer.save` writes to a model, in place.

    - For a model with token types, the two texts of a pair get different types.
    - For a decoder with a task head, special tokens are added where
      `objectives.task_rows.RowTask` has them. `transformers` finds the pooled position by looking
      for the last token that is not padding, so a tokenizer without a padding token gets one.

    - For a language model that reads from left to right, a text gets the token that begins it, as
      in `objectives.causal_lm`, and none at its end, where it is continued. Tokenizers without a
      separate begin token, as GPT-2's, stay as they are published; but T5's, which would put
      </s> after each text, puts it before.

    - For a model that generates targets, a source gets the token that ends it and none that begins
      it, as in `objectives.text_to_text`.

    - Texts are truncated to the model's positions, if there is no lower `model_max_length`.

    - A SentencePiece model of T5's kind gets the tokenizer.json that `transformers` reads first.

    Args:
        generates_targets: see `Weights.generates_targets`.

    Returns:
        The id of the padding token; None if there is none.
    """
    pad = vocabulary.pad
    is_fast = (folder / _MODEL).is_file() or fast_tokenizer.convert(folder, vocabulary)
    settings = _read(folder / _SETTINGS)
    if (positions := config.max_positions) is not None:
        # `truncation=True` of transformers reads it; many published files say 1e30.
        stated = settings.get("model_max_length")
        shorter = isinstance(stated, int) and 0 < stated < positions
        settings["model_max_length"] = stated if shorter else positions
    if not is_fast:
        (folder / _SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
        return pad
    if config.type_vocab > 1:
        # Without this, transformers would not pass the types on, and both texts would have 0.
        settings.setdefault("model_input_names", ["input_ids", "token_type_ids", "attention_mask"])
    # A task head of a decoder pools its last token; see `objectives.task_rows.RowTask`.
    if config.decoder and config.head != "language_model":
        backend = tokenizers.Tokenizer.from_file(str(folder / _MODEL))
        backend.post_processor = _template(backend, vocabulary.cls, vocabulary.end)
        if pad is None:
            backend.add_special_tokens([PADDING])
            pad = backend.token_to_id(PADDING)
            settings["pad_token"] = PADDING
            _add_names(folder, {"pad_token": PADDING})
        backend.save(str(folder / _MODEL))
    elif generates_targets:
        backend = tokenizers.Tokenizer.from_file(str(folder / _MODEL))
        backend.post_processor = _template(backend, None, vocabulary.end)
        backend.save(str(folder / _MODEL))
    elif config.causal and not config.prefix_lm:
        _adapt_to_left_to_right(folder, settings, vocabulary)
    (folder / _SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return pad


def _adapt_to_left_to_right(folder: Path, settings: Tree, vocabulary: Vocabulary) -> None:
    """Puts the token that begins a text before it; see `adapt`. Changes `settings`."""
    begins = vocabulary.cls
    if settings.get("tokenizer_class") in T5_CLASSES:
        # T5's classes of transformers replace any template by their own, "A </s>".
        settings["tokenizer_class"] = "PreTrainedTokenizerFast"
        begins = vocabulary.end if begins is None else begins
    if begins is None:
        return
    backend = tokenizers.Tokenizer.from_file(str(folder / _MODEL))
    begin = backend.id_to_token(begins)
    backend.post_processor = TemplateProcessing(
        single=f"{begin}:0 $A:0",
        pair=f"{begin}:0 $A:0 $B:0",
        special_tokens=[(begin, begins)],
    )
    backend.save(str(folder / _MODEL))
    # Programs that generate or score texts look for tokens of these names.
    named = {"bos_token": begins, "eos_token": vocabulary.end}
    added = {name: backend.id_to_token(token) for name, token in named.items() if token is not None}
    settings |= added
    _add_names(folder, added)


def _add_names(folder: Path, added: Mapping[str, str | None]) -> None:
    """Adds special tokens to the file that older versions of `transformers` read."""
    names = _read(folder / _NAMES)
    (folder / _NAMES).write_text(json.dumps(names | dict(added), indent=2), encoding="utf-8")


def _read(file: Path) -> Tree:
    with damage_of(file, DataError, "Copy the tokenizer again."):
        return read_json(file, dict[str, object])


def _template(
    backend: tokenizers.Tokenizer, begin: int | None, end: int | None
) -> TemplateProcessing:
    assert end is not None, (
        "the model was trained with a tokenizer that has a token to end texts with"
    )
    # For GPT-2, whose only special token begins and ends texts: "A <|endoftext|>", and for a pair
    # "A <|endoftext|> B <|endoftext|>". A tokenizer with a [CLS] of its own puts it before A.
    tokens = [end] if begin in (None, end) else [begin, end]
    names = [backend.id_to_token(token) for token in tokens]
    before, after = " ".join(f"{name}:0" for name in names[:-1]), names[-1]
    return TemplateProcessing(
        single=f"{before} $A:0 {after}:0".strip(),
        pair=f"{before} $A:0 {after}:0 $B:0 {after}:0".strip(),
        special_tokens=list(zip(names, tokens, strict=True)),
    )
