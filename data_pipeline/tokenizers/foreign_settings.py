"""Settings in a tokenizer's folder: applied as `transformers` applies them, or rejected by name.

`transformers` builds a tokenizer from a vocabulary, a class and the settings of that class. With
another class or setting, the same vocabulary gives other ids for the same text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import tokenizers
from tokenizers import AddedToken, models

from data_pipeline.tokenizers.settings import (
    CONFIG,
    MODEL,
    ROLES,
    parts,
    read_file,
    role_name,
    stated,
)
from samestep.config import Tree
from samestep.errors import DataError

if TYPE_CHECKING:
    from data_pipeline.tokenizers.sentencepiece import SentencePiece

logger = logging.getLogger(__name__)

_ADDED = "added_tokens.json"

_OF_ANY = ("PreTrainedTokenizer", "TokenizersBackend")  # without further settings


def _classes(*names: str) -> frozenset[str]:
    return frozenset(f"{name}Tokenizer" for name in names)


# Names without "Fast" at their end. The classes that vocab.txt is read for, and vocab.json:
BERT_CLASSES = _classes(
    *("Bert", "ConvBert", "DistilBert", "DPRContextEncoder", "DPRQuestionEncoder", "DPRReader"),
    *("Electra", "LayoutLM", "Lxmert", "MobileBert", "MPNet", "Nezha", "Realm", "RetriBert"),
    "SqueezeBert",
)
GPT2_CLASSES = _classes(
    *("Bart", "Blenderbot", "CodeGen", "Deberta", "GPT2", "LED", "Longformer", "Mvp", "Roberta")
)
# Classes written in Python, which do not use a tokenizer.json beside their files.
_IN_PYTHON = _classes(
    *("Bartpho", "BertGeneration", "BertJapanese", "Bertweet", "BioGpt", "ByT5", "Canine"),
    *("CharacterBert", "Clvp", "CpmAnt", "CTRL", "ErnieM", "Esm", "Flaubert", "FSMT"),
    *("GPTNeoXJapanese", "GPTSanJapanese", "GPTSw3", "M2M100", "Marian", "Mgpstr", "MyT5"),
    *("Perceiver", "Phobert", "PLBart", "ProphetNet", "RoCBert", "Siglip", "Speech2Text"),
    *("SpeechT5", "Tapas", "Tapex", "TransfoXL", "Vits", "Wav2Vec2CTC", "XLM", "XLMProphetNet"),
)
# By model_type, where config.json names no class. Others have BERT's, GPT-2's or no such files.
_CLASS_OF_MODEL = {
    "albert": "Albert",
    "bert-generation": "BertGeneration",
    "big_bird": "BigBird",
    "bigbird_pegasus": "Pegasus",
    "biogpt": "BioGpt",
    "blenderbot": "Blenderbot",
    "camembert": "Camembert",
    "clip": "CLIP",
    "cpmant": "CpmAnt",
    "ctrl": "CTRL",
    "deberta-v2": "DebertaV2",
    "esm": "Esm",
    "flaubert": "Flaubert",
    "fnet": "FNet",
    "funnel": "Funnel",
    "gpt_neox": "GPTNeoX",
    "herbert": "Herbert",
    "longt5": "T5",
    "mpnet": "MPNet",
    "mt5": "T5",
    "openai-gpt": "OpenAIGPT",
    "pegasus": "Pegasus",
    "qwen2": "Qwen2",
    "reformer": "Reformer",
    "roc_bert": "RoCBert",
    "roformer": "RoFormer",
    "splinter": "Splinter",
    "switch_transformers": "T5",
    "t5": "T5",
    "tapas": "Tapas",
    "umt5": "T5",
    "whisper": "Whisper",
    "xlm": "XLM",
    "xlm-roberta": "XLMRoberta",
    "xlnet": "XLNet",
}
# With their defaults: settings of classes that build a tokenizer from those and its vocabulary.
_SETTINGS_OF_CLASS: dict[str, dict[str, bool]] = {
    "AlbertTokenizer": {"do_lower_case": True, "keep_accents": False, "add_prefix_space": True},
    "BigBirdTokenizer": {"add_prefix_space": True},
    "CamembertTokenizer": {"add_prefix_space": True},
    "DebertaV2Tokenizer": {"do_lower_case": False, "split_by_punct": False},
    "Qwen2Tokenizer": {"add_prefix_space": False},
    "XLMRobertaTokenizer": {"add_prefix_space": True},
    "XLNetTokenizer": {"do_lower_case": False, "keep_accents": False},
}
_ROBERTA_NAMES = {"bos_token": "<s>", "eos_token": "</s>", "sep_token": "</s>", "cls_token": "<s>"}
_ROBERTA_NAMES |= {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"}
_BERT_NAMES = {"bos_token": "[CLS]", "eos_token": "[SEP]", "sep_token": "[SEP]"}
_BERT_NAMES |= {"cls_token": "[CLS]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
# Special tokens of classes where USUAL_NAMES would take another token of the vocabulary, or none.
_NAMES_OF_CLASS = {
    "AlbertTokenizer": _BERT_NAMES | {"pad_token": "<pad>", "unk_token": "<unk>"},
    "CamembertTokenizer": _ROBERTA_NAMES,
    "DebertaV2Tokenizer": _BERT_NAMES | {"unk_token": "[UNK]"},
    "FunnelTokenizer": {"cls_token": "<cls>", "sep_token": "<sep>"},
    "MPNetTokenizer": _ROBERTA_NAMES | {"unk_token": "[UNK]"},
    "PegasusTokenizer": {"mask_token": "<mask_2>"},
    "XLMRobertaTokenizer": _ROBERTA_NAMES,
    "XLNetTokenizer": _ROBERTA_NAMES | {"cls_token": "<cls>", "sep_token": "<sep>"},
}
CONVERT = (
    "Convert it to tokenizer.json with AutoTokenizer.from_pretrained(...).save_pretrained(DIR) of "
    "transformers, and name that folder."
)


def class_name(folder: Path, settings: Tree) -> str | None:
    """Returns the tokenizer's class in transformers, without "Fast"; None if no file says it.

    Raises:
        DataError: it is code in the folder.
    """
    # Code of a stranger is never run, whatever the other settings say.
    code = settings.get("auto_map") or {}
    if isinstance(code, list) or "AutoTokenizer" in code:
        raise DataError(f"auto_map in {CONFIG} names a class in the folder's own code. {CONVERT}")
    model = read_file(folder / "config.json")
    if own := settings.get("tokenizer_class") or model.get("tokenizer_class"):
        # Both versions of a class are meant to give the same ids.
        return str(own).removesuffix("Fast")
    name = _CLASS_OF_MODEL.get(model.get("model_type", ""))
    return name and f"{name}Tokenizer"


def with_names(kind: str | None, settings: Tree) -> Tree:
    """Returns the settings with the names that special tokens of a class have without them."""
    return {**_NAMES_OF_CLASS.get(kind or "", {}), **settings}


def setting(settings: Tree, kind: str, name: str) -> bool:
    """Returns a setting of a class that builds its tokenizer from settings, or its default."""
    return bool(flag(settings, name, _SETTINGS_OF_CLASS[kind].get(name, False)))


def check_class(kind: str | None, file: str, known: frozenset[str]) -> None:
    """Rejects a class that makes other ids of a file.

    Raises:
        DataError: it does.
    """
    if kind is not None and kind not in known:
        fix = "Use another tokenizer." if kind in _IN_PYTHON else CONVERT
        if known:
            fix += f" If a class such as {min(known)} made the ids, set tokenizer_class to it."
        raise DataError(f"{kind} of transformers does not use {file} as it is read here. {fix}")


def flag(settings: Tree, name: str, default: bool | None) -> bool | None:
    """Returns the value of a setting that is true, false or null, which is the default.

    Raises:
        DataError: it is something else.
    """
    value = settings.get(name)
    if not isinstance(value, bool | None):
        raise DataError(f"{name} is {value!r} in {CONFIG}. Write true or false.")
    return default if value is None else value


def check_wordpiece(settings: Tree) -> None:
    """Rejects settings of BERT's class that its fast and slow version read differently.

    Raises:
        DataError: there is one.
    """
    special = set(special_names(settings))
    # Special tokens are never split anyway.
    never = [word for word in settings.get("never_split") or () if word not in special]
    prefix = settings.get("wordpieces_prefix", "##")
    for name, value, is_usual in (
        ("never_split", never, not never),
        ("do_basic_tokenize", False, flag(settings, "do_basic_tokenize", True)),
        ("wordpieces_prefix", prefix, prefix == "##"),
    ):
        if not is_usual:
            raise DataError(f"{name} is {value!r} in {CONFIG}, which is not supported. {CONVERT}")


def check_tokenizer_json(backend: tokenizers.Tokenizer, kind: str | None, settings: Tree) -> None:
    """Rejects settings that say something else than tokenizer.json.

    Versions of transformers differ in which of the two they use.

    Raises:
        DataError: there is one, or the class has no tokenizer.json.
    """
    if kind in _IN_PYTHON:
        check_class(kind, MODEL, frozenset())
    stored = _stored_settings(backend, kind)
    defaults: Tree = {"do_lower_case": True, "tokenize_chinese_chars": True, "clean_text": True}
    defaults |= {"add_prefix_space": False, "strip_accents": stored.get("do_lower_case")}
    own = _SETTINGS_OF_CLASS.get(kind or "", {})
    warned = kind in BERT_CLASSES | GPT2_CLASSES or own
    for name, value in stored.items():
        given, default = flag(settings, name, None), {**defaults, **own}[name]
        if given not in (None, value):
            raise _contradiction(name, given, value)
        if given is None and value != default and warned:
            logger.warning(
                "%s has %s %s, and %s does not say so: %s of transformers would change that. "
                "Write it there.",
                MODEL,
                name,
                json.dumps(value),
                CONFIG,
                kind,
            )
    unknown, named = _unknown_token(backend), role_name(settings, "unk")
    if unknown and named not in (None, unknown) and kind not in _OF_ANY:
        raise _contradiction("unk_token", named, unknown)


def _contradiction(name: str, given: object, stored: object) -> DataError:
    return DataError(
        f"{name} is {json.dumps(given)} in {CONFIG}, and {MODEL} has {json.dumps(stored)}. "
        f"Correct one of them: earlier versions of samestep used {MODEL}."
    )


def _stored_settings(backend: tokenizers.Tokenizer, kind: str | None) -> Tree:
    """Returns what tokenizer.json says about the settings that the class reads, none of them null.

    It is empty for most classes of SentencePiece models, which read none.
    """
    normalizer, splitter = parts(backend.normalizer), parts(backend.pre_tokenizer)
    found = stated(backend)
    if kind in _OF_ANY:  # which ignore BERT's settings
        return {name: value for name, value in found.items() if name == "add_prefix_space"}
    if "do_lower_case" in found:
        found["clean_text"] = normalizer["BertNormalizer"]["clean_text"]
        if found["strip_accents"] is None:
            found["strip_accents"] = found["do_lower_case"]
    own: Tree = {
        "do_lower_case": "Lowercase" in normalizer,
        "keep_accents": "StripAccents" not in normalizer,
        "split_by_punct": "Punctuation" in splitter,
    }
    if "ByteLevel" in splitter:
        own["add_prefix_space"] = splitter["ByteLevel"]["add_prefix_space"]
    if "Metaspace" in splitter:
        own["add_prefix_space"] = splitter["Metaspace"]["prepend_scheme"] != "never"
    read = _SETTINGS_OF_CLASS.get(kind or "", {})
    return found | {name: own[name] for name in read if name in own}


def _unknown_token(backend: tokenizers.Tokenizer) -> str | None:
    """Returns the token that stands for unknown text, if the model has one."""
    model = backend.model
    if isinstance(model, models.Unigram):
        unknown = json.loads(model.__getstate__())["unk_id"]
        return None if unknown is None else backend.id_to_token(unknown)
    has_name = isinstance(model, models.WordPiece | models.WordLevel | models.BPE)
    return model.unk_token if has_name else None


def check_sentencepiece(
    backend: SentencePiece,
    kind: str | None,
    settings: Tree,
    added: Mapping[str, tuple[AddedToken, int]],
) -> None:
    """Rejects settings that a SentencePiece model cannot express.

    Args:
        kind: see `class_name`.
        added: see `added_tokens`.

    Raises:
        DataError: there is one.
    """
    usual: dict[str, tuple[object, ...]] = {"sp_model_kwargs": ({},), "add_prefix_space": (True,)}
    if kind != "T5Tokenizer":  # which has no such settings
        usual |= {"do_lower_case": (False,), "keep_accents": (True,), "remove_space": (True,)}
    for name, values in usual.items():
        if settings.get(name) not in (None, *values):
            raise DataError(f"{name} is {settings[name]!r} in {CONFIG}. {CONVERT}")
    for role in ("pad", "eos", "unk"):
        named, own = role_name(settings, role), backend.names.get(f"{role}_token")
        if named not in (None, own):
            raise DataError(f"{role}_token is {named!r}, and {own!r} in the model. {CONVERT}")
    for name in special_names(settings):
        if name not in backend.names.values() and not backend.has(name):
            raise DataError(f"the model has no special token {name!r}. {CONVERT}")
    # A SentencePiece file cannot hold further tokens, so each must be in the model.
    for content, (_, token_id) in added.items():
        if (own := backend.token(token_id)) != content:
            raise DataError(
                f"the added token {content!r} has the id {token_id}, where the model has {own!r}. "
                f"{CONVERT}"
            )


def add_tokens(backend: tokenizers.Tokenizer, folder: Path, settings: Tree) -> None:
    """Adds the tokens that the settings name and the vocabulary lacks, with their ids.

    Raises:
        DataError: a token would get another id than the settings say.
    """
    for content, (token, token_id) in added_tokens(folder, settings).items():
        old = backend.get_added_tokens_decoder().get(token_id)
        # No text becomes a special token, so its other properties do not matter.
        if old is None or not (old.content == content and old.special and token.special):
            _add(backend, token)
        if (own := backend.token_to_id(content)) != token_id:
            raise DataError(
                f"the added token {content!r} has the id {token_id}, and its place in the "
                f"vocabulary is {own}. Correct the id, or the vocabulary."
            )
    for token in _special_tokens(settings):
        is_role = token.content in _role_names(settings)
        # A token with a role may be an ordinary token of the vocabulary; others become added ones.
        known = backend.get_vocab() if is_role else _contents(backend)
        if token.content not in known:
            _add(backend, token)


def added_tokens(folder: Path, settings: Tree) -> dict[str, tuple[AddedToken, int]]:
    """Returns the added tokens that the settings list with ids, in the order of the ids.

    Raises:
        DataError: an entry is damaged.
    """
    special = set(special_names(settings))
    found: dict[str, tuple[AddedToken, int]] = {}
    try:
        if "added_tokens_decoder" in settings:
            for token_id, fields in settings["added_tokens_decoder"].items():
                found[fields["content"]] = (
                    _token(fields, fields.get("special", False)),
                    int(token_id),
                )
        else:
            for content, token_id in read_file(folder / _ADDED).items():
                is_special = content in special
                token = AddedToken(content, normalized=not is_special, special=is_special)
                found[content] = (token, int(token_id))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DataError(f"the added tokens cannot be read ({error}). Copy the folder again.") from (
            error
        )
    # Added in this order, each gets the next free id.
    return dict(sorted(found.items(), key=lambda entry: entry[1][1]))


def special_names(settings: Tree) -> list[str]:
    """Returns all special tokens that the settings name."""
    return [token.content for token in _special_tokens(settings)]


def _role_names(settings: Tree) -> set[str]:
    return {name for role in ROLES if (name := role_name(settings, role))}


def _special_tokens(settings: Tree) -> Iterator[AddedToken]:
    """Yields the special tokens that the settings name, in the order of transformers."""
    extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    named = [settings.get(f"{role}_token") for role in ROLES]
    for value in (*named, *(extra.values() if isinstance(extra, dict) else extra)):
        if value:
            yield _token(value if isinstance(value, dict) else {"content": value}, special=True)


def _token(fields: Tree, special: bool) -> AddedToken:
    known = ("single_word", "lstrip", "rstrip", "normalized")
    given = {name: fields[name] for name in known if name in fields}
    return AddedToken(fields["content"], special=special, **given)


def _add(backend: tokenizers.Tokenizer, token: AddedToken) -> None:
    if token.special:
        backend.add_special_tokens([token])
    else:
        backend.add_tokens([token])


def _contents(backend: tokenizers.Tokenizer) -> set[str]:
    return {token.content for token in backend.get_added_tokens_decoder().values()}
