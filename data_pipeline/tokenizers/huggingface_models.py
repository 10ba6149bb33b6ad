"""Makes tokenizers of the package `tokenizers`: trains them, or reads other programs' files."""

from __future__ import annotations

import io
import itertools
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

import tokenizers
import zstandard
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.tokenizers.class_parts import check_parts
from data_pipeline.tokenizers.foreign_settings import (
    BERT_CLASSES,
    GPT2_CLASSES,
    add_tokens,
    check_class,
    check_tokenizer_json,
    check_wordpiece,
    class_name,
    flag,
    special_names,
)
from data_pipeline.tokenizers.huggingface import USUAL_NAMES, read_saved
from data_pipeline.tokenizers.settings import CONFIG, MODEL, ROLES, role_name
from samestep.config import Tree

logger = logging.getLogger(__name__)

_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Without <mask>, which has the last id of RoBERTa's vocabulary.
_ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
_USUAL = frozenset(itertools.chain.from_iterable(USUAL_NAMES.values()))
_ROLE_NAMES = tuple(f"{role}_token" for role in ROLES)
# Distinct characters that a WordPiece vocabulary spells words with, as in BERT's own.
_ALPHABET_LIMIT = 1000
_IN_MEMORY = 2**26  # bytes of compressed texts; more go to a temporary file


def train(
    texts: Iterable[str],
    algorithm: str,
    vocab_size: int,
    lowercase: bool,
    strip_accents: bool | None,
    min_frequency: int,
) -> tokenizers.Tokenizer:
    """Trains "wordpiece" as for BERT, "words", or "bpe", byte-level, as for RoBERTa."""
    normalizer = _normalizer(lowercase, strip_accents)
    if algorithm == "wordpiece":
        backend = _train_wordpiece(texts, vocab_size, normalizer, min_frequency)
    elif algorithm == "words":
        backend = _of_words(models.WordLevel({}, unk_token="[UNK]"), normalizer)
        words = trainers.WordLevelTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=_BERT_SPECIAL,
            show_progress=False,
        )
        backend.train_from_iterator(texts, words)
    else:
        backend = _byte_level_bpe(models.BPE())
        if lowercase:
            backend.normalizer = normalizers.Lowercase()
        merges = trainers.BpeTrainer(
            vocab_size=vocab_size - 1,  # <mask> is added afterwards
            min_frequency=min_frequency,
            special_tokens=_ROBERTA_SPECIAL,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        backend.train_from_iterator(texts, merges)
        backend.add_special_tokens([_mask_token("<mask>")])
    _set_template(backend)
    return backend


def _train_wordpiece(
    texts: Iterable[str],
    vocab_size: int,
    normalizer: normalizers.BertNormalizer,
    min_frequency: int,
) -> tokenizers.Tokenizer:
    """Trains a WordPiece vocabulary, the same one each time.

    `tokenizers` gives "##a" and the like their ids in the order of a hash table, which differs from
    run to run, and breaks ties between merges by ids. So a first pass finds the characters, and the
    second has them as tokens with fixed ids.
    """
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        characters = _characters(_kept(texts, file), normalizer)
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=[*_BERT_SPECIAL, *characters],
            show_progress=False,
            limit_alphabet=0,  # no other characters
        )
        trained = _wordpiece({}, normalizer)
        trained.train_from_iterator(_again(file), trainer)
    # The trained one would take the characters for special tokens.
    backend = _wordpiece(trained.get_vocab(), normalizer)
    backend.add_special_tokens(_BERT_SPECIAL)
    return backend


def _characters(texts: Iterable[str], normalizer: normalizers.BertNormalizer) -> list[str]:
    """Returns the most frequent characters, then those that continue a word, as "##a"."""
    counts: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for text in texts:
            counts.update(text)
            yield text

    backend = _wordpiece({}, normalizer)
    # Without room for merges, the vocabulary has the characters only.
    trainer = trainers.WordPieceTrainer(vocab_size=0, show_progress=False)
    backend.train_from_iterator(counted(), trainer)
    found = backend.get_vocab()
    frequency: Counter[str] = Counter()
    for character, count in counts.items():
        for part in backend.normalizer.normalize_str(character):  # "É" may count as "e"
            frequency[part] += count
    ranked = sorted(token for token in found if len(token) == 1)
    ranked.sort(key=lambda character: -frequency[character])
    alphabet = sorted(ranked[:_ALPHABET_LIMIT])
    return [*alphabet, *(f"##{each}" for each in alphabet if f"##{each}" in found)]


def _kept(texts: Iterable[str], file: IO[bytes]) -> Iterator[str]:
    """Writes the texts to a file while they are read, since a source may be a download."""
    with zstandard.ZstdCompressor().stream_writer(file, closefd=False) as lines:
        for text in texts:
            lines.write(json.dumps(text).encode() + b"\n")
            yield text


def _again(file: IO[bytes]) -> Iterator[str]:
    file.seek(0)
    with zstandard.ZstdDecompressor().stream_reader(file, closefd=False) as content:
        yield from map(json.loads, io.TextIOWrapper(content, encoding="utf-8"))


def read(folder: Path, settings: Tree) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, vocab.txt, vocab.json and merges.txt, or a class's SentencePiece model.

    Raises:
        FileNotFoundError: none of these exists.
        DataError: `transformers` would give other ids, by the folder's settings.
    """
    kind = class_name(folder, settings)
    if (folder / MODEL).is_file():
        backend = read_saved(folder)
        check_tokenizer_json(backend, kind, settings)
        check_parts(backend, kind, folder)
    elif (folder / "vocab.txt").is_file():
        check_class(kind, "vocab.txt", BERT_CLASSES)
        backend = _read_wordpiece(folder / "vocab.txt", settings)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        check_class(kind, "vocab.json", GPT2_CLASSES)
        files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
        add_space = flag(settings, "add_prefix_space", kind == "BlenderbotTokenizer")
        backend = _byte_level_bpe(models.BPE.from_file(*files), bool(add_space))
        _add_special_tokens(backend, _USUAL)
    else:
        from data_pipeline.tokenizers import unigram_models

        found = unigram_models.read(folder, kind, settings)
        if found is None or kind is None:
            raise FileNotFoundError(folder)
        add_tokens(found, folder, settings)
        unigram_models.set_template(found, kind, settings)
        return found
    add_tokens(backend, folder, settings)
    if not (folder / MODEL).is_file():
        _set_template(backend, settings)
    return backend


def _normalizer(
    lowercase: bool, strip_accents: bool | None, chinese: bool = True
) -> normalizers.BertNormalizer:
    """Makes BERT's normalizer. Without `strip_accents`, accents go with upper case."""
    # None is the same as `lowercase`, and every tokenizer has one fingerprint.
    accents = None if strip_accents == lowercase else strip_accents
    return normalizers.BertNormalizer(
        handle_chinese_chars=chinese, strip_accents=accents, lowercase=lowercase
    )


def _read_wordpiece(file: Path, settings: Tree) -> tokenizers.Tokenizer:
    check_wordpiece(settings)
    tokens = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
    # A vocabulary without capital letters, but for special tokens, was made for lower case.
    special = special_names(settings)
    words = (token for token in tokens if not token.startswith("[") and token not in special)
    cased = any(token != token.lower() for token in words)
    lowercase = bool(flag(settings, "do_lower_case", not cased))
    if cased and settings.get("do_lower_case") is None:
        logger.warning(
            "%s has capital letters, and %s has no do_lower_case: text keeps its case, where "
            "transformers would change it to lower case. Set do_lower_case there.",
            file,
            CONFIG,
        )
    chinese = bool(flag(settings, "tokenize_chinese_chars", True))
    normalizer = _normalizer(lowercase, flag(settings, "strip_accents", None), chinese)
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = _wordpiece(vocab, normalizer, role_name(settings, "unk") or "[UNK]")
    # MPNet's vocabulary has [CLS] and the like as ordinary tokens, and its settings name all roles.
    _add_special_tokens(backend, special if all(map(settings.get, _ROLE_NAMES)) else _USUAL)
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer, names: Iterable[str]) -> None:
    """Marks the special tokens of these names."""
    known = sorted(set(names).intersection(backend.get_vocab()))
    special = [_mask_token(name) if name == "<mask>" else name for name in known]
    backend.add_special_tokens(special)


def _mask_token(name: str) -> tokenizers.AddedToken:
    """Makes RoBERTa's mask token.

    It replaces a word with the space before it, since the vocabulary has the space in the word.
    """
    return tokenizers.AddedToken(name, lstrip=True, special=True)


def _wordpiece(
    vocab: dict[str, int], normalizer: normalizers.BertNormalizer, unknown: str = "[UNK]"
) -> tokenizers.Tokenizer:
    """Makes BERT's own tokenizer (Devlin et al. 2019)."""
    backend = _of_words(models.WordPiece(vocab, unk_token=unknown), normalizer)
    backend.decoder = decoders.WordPiece()
    return backend


def _of_words(model: models.Model, normalizer: normalizers.BertNormalizer) -> tokenizers.Tokenizer:
    """Makes a tokenizer that splits text at white space and around signs, as BERT's does."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return backend


def _byte_level_bpe(model: models.BPE, add_space: bool = False) -> tokenizers.Tokenizer:
    """Makes GPT-2's tokenizer (Radford et al. 2019).

    Every byte is in the vocabulary, so no text is unknown.
    """
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_space)
    backend.decoder = decoders.ByteLevel()
    return backend


def _set_template(backend: tokenizers.Tokenizer, settings: Tree | None = None) -> None:
    """Sets how `transformers` puts special tokens around a sequence.

    For `transformers` only: in samestep, the objectives place special tokens.
    """
    templates = [
        ("[CLS]", "[SEP]", processors.BertProcessing),
        ("<s>", "</s>", processors.RobertaProcessing),
    ]
    own = [role_name(settings or {}, role) for role in ("cls", "sep")]
    if own == ["<s>", "</s>"]:  # MPNet's vocabulary has BERT's names too
        templates.reverse()
    elif own[0] and own[1] and own[0] not in ("[CLS]", "<s>"):
        is_bert = isinstance(backend.model, models.WordPiece)
        templates.insert(0, (own[0], own[1], templates[0 if is_bert else 1][2]))
    for cls, sep, template in templates:
        cls_id, sep_id = backend.token_to_id(cls), backend.token_to_id(sep)
        if cls_id is not None and sep_id is not None:
            backend.post_processor = template((sep, sep_id), (cls, cls_id))
            return
