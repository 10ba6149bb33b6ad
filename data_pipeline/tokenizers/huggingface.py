"""Tokenizers run by Hugging Face's package `tokenizers`: WordPiece, byte-level BPE and others."""

from __future__ import annotations

import hashlib
import io
import itertools
import json
import logging
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import IO

import numpy as np
import tokenizers
import zstandard
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.format.manifest import token_dtype
from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers.alignment import Aligned, trim
from data_pipeline.tokenizers.limits import check_ids, check_limits
from data_pipeline.tokenizers.sentencepiece import sentinels_in
from data_pipeline.tokenizers.sentences import full_stops
from data_pipeline.tokenizers.settings import (
    BERT_CLASSES,
    CONFIG,
    GPT2_CLASSES,
    MODEL,
    add_tokens,
    by_name,
    check_class,
    check_tokenizer_json,
    check_wordpiece,
    class_name,
    flag,
    role_name,
    special_names,
    stated,
)
from data_pipeline.tokenizers.words import WordEncoder, ends_tokens_with_words
from samestep.config import Tree
from samestep.examples import Vocabulary

logger = logging.getLogger(__name__)

_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
# Without <mask>, which has the last id of RoBERTa's vocabulary.
_ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
# Distinct characters that a WordPiece vocabulary spells words with, as in BERT's own.
_ALPHABET_LIMIT = 1000
_IN_MEMORY = 2**26  # bytes of compressed texts; more go to a temporary file

# Names of special tokens that the tokenizer's settings do not give.
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
    "eos": ("</s>", "<|endoftext|>"),
}


def train(
    texts: Iterable[str],
    algorithm: str,
    vocab_size: int,
    lowercase: bool,
    min_frequency: int,
) -> tokenizers.Tokenizer:
    """Trains "wordpiece" as for BERT, "words", or "bpe", byte-level, as for RoBERTa."""
    if algorithm == "wordpiece":
        backend = _train_wordpiece(texts, vocab_size, lowercase, min_frequency)
    elif algorithm == "words":
        backend = _of_words(models.WordLevel({}, unk_token="[UNK]"), lowercase)
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
    texts: Iterable[str], vocab_size: int, lowercase: bool, min_frequency: int
) -> tokenizers.Tokenizer:
    """Trains a WordPiece vocabulary, the same one each time.

    `tokenizers` gives "##a" and the like their ids in the order of a hash table, which differs from
    run to run, and breaks ties between merges by ids. So a first pass finds the characters, and the
    second has them as tokens with fixed ids.
    """
    with tempfile.SpooledTemporaryFile(_IN_MEMORY) as file:
        characters = _characters(_kept(texts, file), lowercase)
        trainer = trainers.WordPieceTrainer(
            vocab_size=vocab_size,
            min_frequency=min_frequency,
            special_tokens=[*_BERT_SPECIAL, *characters],
            show_progress=False,
            limit_alphabet=0,  # no other characters
        )
        trained = _wordpiece({}, lowercase)
        trained.train_from_iterator(_again(file), trainer)
    # The trained one would take the characters for special tokens.
    backend = _wordpiece(trained.get_vocab(), lowercase)
    backend.add_special_tokens(_BERT_SPECIAL)
    return backend


def _characters(texts: Iterable[str], lowercase: bool) -> list[str]:
    """Returns the most frequent characters, then those that continue a word, as "##a"."""
    counts: Counter[str] = Counter()

    def counted() -> Iterator[str]:
        for text in texts:
            counts.update(text)
            yield text

    backend = _wordpiece({}, lowercase)
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


class HuggingFace:
    """A tokenizer of the package `tokenizers`; methods as in `tokenizer.Tokenizer`.

    Attributes:
        vocabulary: its size and special tokens.
        names: its special tokens by role, as transformers names roles, such as pad_token.
        settings: tokenizer_config.json, as transformers reads it.

    Args:
        backend: the tokenizer. It is changed: it no longer finds special tokens in text, truncates
            or pads.
        settings: its tokenizer_config.json.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        settings: Tree,
    ) -> None:
        check_limits(backend)
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        vocab = backend.get_vocab()
        check_ids(vocab)
        names = {role: _special_token(vocab, settings, role) for role in _USUAL_NAMES}
        self.names = {f"{role}_token": name for role, name in names.items() if name}
        self.settings = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.names,
            **by_name(settings),
            **stated(backend),
        }
        ids = {role: vocab[name] for role, name in names.items() if name}
        added = backend.get_added_tokens_decoder().items()
        special = {*ids.values(), *(i for i, token in added if token.special)}
        self.vocabulary = Vocabulary(
            size=max(vocab.values(), default=-1) + 1,
            **{role: ids.get(role) for role in ("pad", "cls", "sep", "mask", "eos")},
            special=tuple(sorted(special)),
            continuing=_continuing(backend, vocab),
            sentinels=sentinels_in(vocab),
            between=_between(backend),
            full_stops=full_stops(vocab),
        )
        self._dtype = token_dtype(self.vocabulary.size)

    @cached_property
    def _words(self) -> WordEncoder | None:
        """The faster way to encode, for tokenizers known to give the same ids by it."""
        is_known = ends_tokens_with_words(self._backend)
        return WordEncoder(self._backend, self._dtype) if is_known else None

    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines the ids of a text.

        It is the same for every version of `tokenizers`.
        """
        content = json.loads(self._backend.to_str())
        sections = ("model", "normalizer", "pre_tokenizer", "added_tokens")
        parts = [_explicit(content[section]) for section in sections]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def with_tokens(self, tokens: Sequence[str], whole_words: bool) -> HuggingFace:
        """Returns this tokenizer with further tokens, which get the ids after its own."""
        added = [tokenizers.AddedToken(token, single_word=whole_words) for token in tokens]
        backend = tokenizers.Tokenizer.from_str(self._backend.to_str())
        backend.add_tokens(added)
        return HuggingFace(backend, self.settings)

    def extends(self, other: HuggingFace) -> bool:
        """Whether this is `other` with further tokens after its own."""
        ours, theirs = json.loads(self._backend.to_str()), json.loads(other._backend.to_str())
        for section in ("model", "normalizer", "pre_tokenizer"):
            if _explicit(ours[section]) != _explicit(theirs[section]):
                return False
        size = other.vocabulary.size
        kept = [token for token in ours["added_tokens"] if token["id"] < size]
        return _explicit(kept) == _explicit(theirs["added_tokens"]) and size < self.vocabulary.size

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        if self._words is not None:
            return self._words.encode_batch(texts)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, self._dtype) for encoding in encodings]

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        # The fast encoding above has no offsets, and neither have remembered words.
        encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        aligned = []
        for text, encoding in zip(texts, encodings, strict=True):
            spans = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            aligned.append((np.array(encoding.ids, self._dtype), trim(text, spans)))
        return aligned

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=False)

    def token(self, token_id: int) -> str | None:
        return self._backend.id_to_token(token_id)

    def normalized(self, text: str) -> str:
        normalizer = self._backend.normalizer
        return text if normalizer is None else normalizer.normalize_str(text)

    def has(self, token: str) -> bool:
        form = self.normalized(token)
        in_vocabulary = (self._backend.token_to_id(each) is not None for each in (token, form))
        return form in self._added_forms or any(in_vocabulary)

    @cached_property
    def _added_forms(self) -> set[str]:
        """What a text has where an added token is found; the vocabulary has its spelling."""
        added = self._backend.get_added_tokens_decoder().values()
        return {self.normalized(token.content) for token in added if token.normalized}

    def files(self) -> dict[str, bytes]:
        """The model's files, by name."""
        return {MODEL: self._backend.to_str(pretty=True).encode()}


def _special_token(
    vocab: dict[str, int],
    settings: Tree,
    role: str,
) -> str | None:
    """Returns the token for a role, or None: by the settings, its usual name, or a similar role."""
    fallback = {"cls": "bos_token", "sep": "eos_token"}.get(role, "")
    named = [settings.get(f"{role}_token"), *_USUAL_NAMES[role], settings.get(fallback)]
    names = [name["content"] if isinstance(name, dict) else name for name in named]
    return next((name for name in names if name and name in vocab), None)


def _continuing(backend: tokenizers.Tokenizer, vocab: dict[str, int]) -> tuple[int, ...] | None:
    """Returns the ids of tokens that continue a word; None if the vocabulary does not mark them."""
    if isinstance(backend.model, models.WordLevel):
        return ()
    if isinstance(backend.model, models.WordPiece):
        # The mark is on the tokens that continue a word: "##ing".
        mark = backend.model.continuing_subword_prefix
        return tuple(sorted(i for token, i in vocab.items() if token.startswith(mark)))
    # Elsewhere it is on the tokens that begin one, and stands for the space before.
    kind = str(backend.pre_tokenizer)
    mark = "Ġ" if "ByteLevel" in kind else "▁" if "Metaspace" in kind else ""
    if not mark:
        return None
    return tuple(sorted(i for token, i in vocab.items() if not token.startswith(mark)))


def read(folder: Path, settings: Tree) -> tokenizers.Tokenizer:
    """Reads tokenizer.json, else vocab.txt, else vocab.json and merges.txt.

    Raises:
        FileNotFoundError: none of these exists.
        DataError: `transformers` would give other ids, by the folder's settings.
    """
    kind = class_name(folder, settings)
    if (folder / MODEL).is_file():
        backend = read_saved(folder)
        check_tokenizer_json(backend, kind, settings)
    elif (folder / "vocab.txt").is_file():
        check_class(kind, "vocab.txt", BERT_CLASSES)
        backend = _read_wordpiece(folder / "vocab.txt", settings)
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        check_class(kind, "vocab.json", GPT2_CLASSES)
        files = (str(folder / "vocab.json"), str(folder / "merges.txt"))
        add_space = flag(settings, "add_prefix_space", kind == "BlenderbotTokenizer")
        backend = _byte_level_bpe(models.BPE.from_file(*files), bool(add_space))
        _add_special_tokens(backend)
    else:
        raise FileNotFoundError(folder)
    add_tokens(backend, folder, settings)
    if not (folder / MODEL).is_file():
        _set_template(backend, settings)
    return backend


def read_saved(folder: Path) -> tokenizers.Tokenizer:
    """Reads the tokenizer.json that `HuggingFace.files` wrote: it has every setting.

    Raises:
        FileNotFoundError: there is none.
    """
    if not (folder / MODEL).is_file():
        raise FileNotFoundError(folder)
    return tokenizers.Tokenizer.from_file(str(folder / MODEL))


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
    accents = flag(settings, "strip_accents", lowercase)
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = role_name(settings, "unk") or "[UNK]"
    backend = _wordpiece(vocab, lowercase, unknown)
    backend.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=bool(flag(settings, "tokenize_chinese_chars", True)),
        # None is the same as `lowercase`, and every tokenizer has one fingerprint.
        strip_accents=None if accents == lowercase else accents,
        lowercase=lowercase,
    )
    _add_special_tokens(backend)
    return backend


def _add_special_tokens(backend: tokenizers.Tokenizer) -> None:
    """Marks the special tokens of the usual names."""
    usual = set(itertools.chain.from_iterable(_USUAL_NAMES.values()))
    known = sorted(usual.intersection(backend.get_vocab()))
    special = [_mask_token(name) if name == "<mask>" else name for name in known]
    backend.add_special_tokens(special)


def _mask_token(name: str) -> tokenizers.AddedToken:
    """Makes RoBERTa's mask token.

    It replaces a word with the space before it, since the vocabulary has the space in the word.
    """
    return tokenizers.AddedToken(name, lstrip=True, special=True)


def _wordpiece(
    vocab: dict[str, int], lowercase: bool, unknown: str = "[UNK]"
) -> tokenizers.Tokenizer:
    """Makes BERT's own tokenizer (Devlin et al. 2019)."""
    backend = _of_words(models.WordPiece(vocab, unk_token=unknown), lowercase)
    backend.decoder = decoders.WordPiece()
    return backend


def _of_words(model: models.Model, lowercase: bool) -> tokenizers.Tokenizer:
    """Makes a tokenizer that splits text at white space and around signs, as BERT's does."""
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
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
    if own[0] and own[1] and own[0] not in ("[CLS]", "<s>"):
        is_bert = isinstance(backend.model, models.WordPiece)
        templates.insert(0, (own[0], own[1], templates[0 if is_bert else 1][2]))
    for cls, sep, template in templates:
        cls_id, sep_id = backend.token_to_id(cls), backend.token_to_id(sep)
        if cls_id is not None and sep_id is not None:
            backend.post_processor = template((sep, sep_id), (cls, cls_id))
            return


def _between(backend: tokenizers.Tokenizer) -> int:
    """Number of special tokens between the two texts of a pair in the tokenizer's own template.

    1 if it has no template.
    """
    if backend.post_processor is None:
        return 1
    settings = json.loads(backend.post_processor.__getstate__())
    for part in settings.get("processors", [settings]):
        if part["type"] == "RobertaProcessing":
            return 2
        if part["type"] == "TemplateProcessing":
            # "[CLS] A [SEP] B [SEP]" is SpecialToken, Sequence, SpecialToken, Sequence, ...: the
            # sequences are at 1 and 3, with one token between them.
            kinds = [next(iter(piece)) for piece in part["pair"]]
            first, *others = (i for i, kind in enumerate(kinds) if kind == "Sequence")
            return max(1, others[0] - first - 1) if others else 1
    return 1


def _explicit(settings: object) -> object:
    """Removes values that are null, false or empty text, at any depth.

    New versions of `tokenizers` write settings that old versions lack, with such values.
    """
    if isinstance(settings, list):
        return [_explicit(entry) for entry in settings]
    if not isinstance(settings, dict):
        return settings
    # Not `v in (None, False, "")`: 0 equals False, and is a value.
    kept = (k for k, v in settings.items() if not (v is None or v is False or v == ""))
    return {k: _explicit(settings[k]) for k in kept}
