"""Parts of tokenizer.json that a tokenizer's class in `transformers` builds itself.

From version 5 on, many classes take the vocabulary of tokenizer.json and nothing else: they build
the normalizer, the pre-tokenizer and the model from their own code and settings. Earlier versions
use the file's. Only a file with the parts of its class gives the same ids in both.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from data_pipeline.tokenizers.foreign_settings import BERT_CLASSES, GPT2_CLASSES
from data_pipeline.tokenizers.settings import CONFIG, MODEL, parts, read_file
from samestep.config import Tree
from samestep.errors import DataError

logger = logging.getLogger(__name__)

# Classes that transformers builds of the whole file, or no longer has.
_AS_WRITTEN = {"ConvBertTokenizer", "NezhaTokenizer", "RealmTokenizer", "RetriBertTokenizer"}
_SPACES = ("Replace  {2,} \u2581", "Replace  {2,}  ", "Replace \\s{2,}|[\\n\\r\\t]  ")
_QUOTES = ('Replace `` "', "Replace '' \"")


@dataclass(frozen=True)
class _Parts:
    """Parts that a class builds, by their descriptions.

    Attributes:
        model: kind of the model.
        needed: parts of the normalizer that are always there.
        others: parts of the normalizer that its settings or its vocabulary decide about.
        splitters: the pre-tokenizers, in their order; "?" may follow one that need not be there.
    """

    model: str
    needed: tuple[str, ...]
    others: tuple[str, ...]
    splitters: tuple[str, ...]


_BERT = _Parts("WordPiece", ("BertNormalizer",), (), ("BertPreTokenizer",))
# Digits are in the files of SmolLM; see `_SPLITTER_OF_CLASS`.
_GPT2 = _Parts("BPE", (), (), ("Digits?", "ByteLevel"))
_UNICODE = ("NFKD", "NFC", "StripAccents", "Lowercase", "Precompiled", "Strip", *_SPACES)
_SPIECE = _Parts(
    "Unigram", (), ("Precompiled", "Strip", *_SPACES), ("WhitespaceSplit?", "Metaspace")
)
_ALBERT = _Parts("Unigram", _QUOTES, _UNICODE, _SPIECE.splitters)
_DEBERTA = _Parts("Unigram", (), _UNICODE, ("Punctuation?", "Metaspace"))
_OF_CLASS: Mapping[str, _Parts] = {
    **dict.fromkeys((BERT_CLASSES | {"FunnelTokenizer", "SplinterTokenizer"}) - _AS_WRITTEN, _BERT),
    **dict.fromkeys(GPT2_CLASSES | {"WhisperTokenizer"}, _GPT2),
    **{f"{name}Tokenizer": _SPIECE for name in ("Camembert", "T5", "XLMRoberta")},
    **{f"{name}Tokenizer": _ALBERT for name in ("Albert", "XLNet")},
    "DebertaV2Tokenizer": _DEBERTA,
    "GPTNeoXTokenizer": _Parts("BPE", ("NFC",), (), ("ByteLevel",)),
}
# Where no file names a class.
_OF_MODEL = {
    **dict.fromkeys(("bert", "distilbert", "electra", "mobilebert", "mpnet", "layoutlm"), _BERT),
    **dict.fromkeys(("gpt2", "roberta", "bart", "deberta", "longformer", "led"), _GPT2),
}
# Splitters of classes whose published files have others, which their models were trained with.
_SPLITTER_OF_CLASS = {"GPT2Tokenizer": {"ByteLevel"}, "LlamaTokenizer": {"Metaspace"}}
# Of a model's settings: others than these are no class's.
_MODEL_SETTINGS: Mapping[str, tuple[object, ...]] = {
    "max_input_chars_per_word": (100,),
    "dropout": (None,),
    "end_of_word_suffix": (None, ""),
    "fuse_unk": (False,),
    "byte_fallback": (False,),
    "ignore_merges": (False,),
}


def check_parts(backend: tokenizers.Tokenizer, kind: str | None, folder: Path) -> None:
    """Rejects a tokenizer.json with other parts than its class in transformers builds.

    Warns where the published files of a class have another splitter, and are right.

    Args:
        kind: see `foreign_settings.class_name`.

    Raises:
        DataError: with the first such part.
    """
    model_type = read_file(folder / "config.json").get("model_type", "")
    expected = _OF_CLASS.get(kind) if kind else _OF_MODEL.get(str(model_type))
    if expected is not None and (reason := _difference(json.loads(backend.to_str()), expected)):
        raise DataError(
            f"{MODEL} has {reason}, unlike {kind or f'the tokenizer of a {model_type}'} of "
            f"transformers, which may not read that part of the file. Set tokenizer_class to "
            f"PreTrainedTokenizerFast in {CONFIG} if the file is right; else save it again."
        )
    splitter = set(parts(backend.pre_tokenizer))
    if splitter != (theirs := _SPLITTER_OF_CLASS.get(kind or "", splitter)):
        logger.warning(
            "%s splits text by %s, and %s of transformers 5 by %s instead, which gives some texts "
            "other ids. These are the ids of %s.",
            *(MODEL, ", ".join(sorted(splitter)) or "its model", kind, ", ".join(theirs), MODEL),
        )


def _difference(content: Tree, parts: _Parts) -> str | None:
    model = content["model"]
    if model["type"] != parts.model:
        return f"a model {model['type']}"
    prefixes = ("##",) if parts.model == "WordPiece" else (None, "")
    for name, values in {**_MODEL_SETTINGS, "continuing_subword_prefix": prefixes}.items():
        if model.get(name, values[0]) not in values:
            return f"{name} {model[name]!r}"
    # Not by order: the settings of a class and its version decide about that.
    found = list(_members(content["normalizer"]))
    for part in found:
        if part not in (*parts.needed, *parts.others):
            return f"the normalizer {part}"
    if missing := [part for part in parts.needed if part not in found]:
        return f"no normalizer {missing[0]}"
    # Albert's are WhitespaceSplit? and Metaspace: a file with or without the first one is right.
    splitters, expected = list(_members(content["pre_tokenizer"])), []
    for name in parts.splitters:
        if not name.endswith("?") or name[:-1] in splitters:
            expected.append(name.removesuffix("?"))
    if splitters != expected:
        return f"the pre-tokenizers {', '.join(splitters) or 'none'}"
    return None


def _members(part: Tree | None) -> Iterator[str]:
    """Yields descriptions of a part: its type, and what decides about ids and no setting names."""
    if part is None:
        return
    kind = part["type"]
    if kind == "Sequence":
        for member in part.get("normalizers") or part.get("pretokenizers") or ():
            yield from _members(member)
    elif kind == "Replace":
        # {"String": "``"} or {"Regex": " {2,}"}: one key, the kind of the pattern.
        (pattern,) = part["pattern"].values()
        yield f"Replace {pattern} {part['content']}"
    elif not part.get("use_regex", True) or part.get("behavior", "Isolated") != "Isolated":
        yield f"{kind} with other settings"
    elif kind == "Metaspace" and (part["replacement"], part["split"]) != ("\u2581", True):
        yield "Metaspace with other settings"
    else:
        yield kind
