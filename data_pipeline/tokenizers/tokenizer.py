"""Tokenizers: WordPiece, byte-level BPE and SentencePiece, trained here or loaded."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers.limits import failures_explained
from data_pipeline.tokenizers.settings import SPIECE, read_settings
from samestep.config import Tree, parse_size
from samestep.errors import ConfigError, DataError
from samestep.examples import TOKENIZER_FILES
from samestep.storage import atomic_write, is_hub_path
from samestep.untrusted import read_regular

if TYPE_CHECKING:
    from data_pipeline.tokenizers.alignment import Aligned
    from data_pipeline.tokenizers.huggingface import HuggingFace
    from data_pipeline.tokenizers.sentencepiece import SentencePiece

Backend: TypeAlias = "HuggingFace | SentencePiece"

CONVERTED_FROM = "converted_from"
"""In tokenizer_config.json: the file that tokenizer.json was converted from, to read instead."""


@dataclass(frozen=True)
class Config:
    """Where the tokenizer is and, for `samestep data tokenizer`, how it is trained.

    Attributes:
        path: its folder, a SentencePiece model, or hf://NAME[@REVISION] on the Hugging Face Hub.
        algorithm: "wordpiece" (BERT); "bpe" (byte-level, RoBERTa and GPT-2); "words", the most
            frequent words and signs as they are (ELMo); or SentencePiece's "unigram" (T5) or
            "sentencepiece_bpe".
        vocab_size: number of ids, special tokens included, but not `sentinels`.
        lowercase: convert the text to lower case (BERT "uncased").
        strip_accents: for wordpiece and words: remove accents, so that "schön" is "schon". None
            does so with `lowercase`, as BERT does. The other algorithms keep accents.
        min_frequency: pairs of tokens seen less often are not merged, and words seen less often
            have no token; not for SentencePiece.
        sample: fraction of the documents, chosen by hash, that it is trained on.
        sample_size: for SentencePiece, which keeps its text in memory: maximum size of the text
            that it is trained on, chosen by hash.
        character_coverage: for SentencePiece: fraction of the text's characters that get a token of
            their own, the most frequent ones; 0.98 to 1.
        byte_fallback: for SentencePiece: spell other characters as bytes instead of `<unk>`.
        sentinels: for SentencePiece: number of tokens `<extra_id_0>`, ... that stand for spans of
            text, as T5's objective needs.
    """

    path: str
    algorithm: Literal["wordpiece", "bpe", "words", "unigram", "sentencepiece_bpe"] = "wordpiece"
    vocab_size: int = 30_522
    lowercase: bool = False
    strip_accents: bool | None = None
    min_frequency: int = 2
    sample: float = 1.0
    sample_size: str = "100MB"
    character_coverage: float = 0.9995
    byte_fallback: bool = False
    sentinels: int = 100

    def __post_init__(self) -> None:
        # WordPiece and words: 5 special tokens and one more. Byte-level BPE: 5 and 256 bytes.
        # SentencePiece: 3 and one more, or 3, 256 bytes and one more.
        least = {"wordpiece": 6, "words": 6, "bpe": 261}.get(
            self.algorithm, 260 if self.byte_fallback else 4
        )
        if not least <= self.vocab_size <= 2**31:
            raise ConfigError(
                f"vocab_size must be at least {least} for {self.algorithm}, not {self.vocab_size}"
            )
        if self.strip_accents and self.algorithm not in ("wordpiece", "words"):
            raise ConfigError(
                f"strip_accents is true, and {self.algorithm} keeps accents. Leave it out, or use "
                "wordpiece or words."
            )
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample must be a fraction in (0, 1], not {self.sample}")
        parse_size(self.sample_size, "sample_size")
        if not 0.98 <= self.character_coverage <= 1:
            raise ConfigError(
                f"character_coverage must be in [0.98, 1], not {self.character_coverage}"
            )
        if self.sentinels < 0:
            raise ConfigError(f"sentinels must be at least 0, not {self.sentinels}. T5 has 100.")

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Trains a tokenizer. Two trainings on the same texts give the same one.

        Raises:
            ConfigError: SentencePiece cannot train a vocabulary of this size on the text.
            DataError: there is no text for it.
        """
        if self.algorithm in ("wordpiece", "bpe", "words"):
            from data_pipeline.tokenizers.huggingface import HuggingFace
            from data_pipeline.tokenizers.huggingface_models import train

            case = (self.lowercase, self.strip_accents)
            settings = (self.algorithm, self.vocab_size, *case, self.min_frequency)
            return Tokenizer(HuggingFace(train(texts, *settings), {}))
        from data_pipeline.tokenizers.sentencepiece import SentencePiece, train_sentencepiece

        model = train_sentencepiece(
            texts,
            self.algorithm.removeprefix("sentencepiece_"),
            self.vocab_size,
            self.lowercase,
            self.character_coverage,
            self.byte_fallback,
            parse_size(self.sample_size, "sample_size"),
        )
        return Tokenizer(SentencePiece(model, {"extra_ids": self.sentinels}))


class Tokenizer:
    """Text to ids and back.

    No text of a document can produce a special token: "[MASK]" in it is a word in brackets.

    Attributes:
        vocabulary: its size and special tokens, for the objectives.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.vocabulary = backend.vocabulary

    @classmethod
    def load(cls, path: str | Path, *, saved: bool = False) -> Tokenizer:
        """Reads a tokenizer.

        Its ids are those that `transformers` gives with the settings in the folder.

        Args:
            path: a folder with tokenizer.json (Hugging Face), vocab.txt (BERT), vocab.json and
                merges.txt (GPT-2), or a SentencePiece model under its name in `transformers`, as
                spiece.model (T5), of which the first that exists is read, but spiece.model before
                the tokenizer.json that an export has made of it; a SentencePiece model; or
                hf://NAME.
            saved: `save` wrote the folder, for a dataset or a run. Its tokenizer.json or
                spiece.model alone decides the ids, since earlier versions ignored the settings.

        Raises:
            DataError: there is none of these, it cannot be read, or has settings that are not
                supported.
            StorageError: it cannot be downloaded.
        """
        if is_hub_path(str(path)):
            from samestep.storage.hub import tokenizer_folder

            path = tokenizer_folder(str(path))
        path = Path(path)
        try:
            with failures_explained():
                return cls(_read_backend(path, saved))
        except FileNotFoundError:
            raise DataError(
                f"there is no tokenizer in {path}: neither tokenizer.json, nor vocab.txt, nor "
                f"vocab.json with merges.txt, nor a {SPIECE}. Train one with: samestep data "
                "tokenizer CONFIG"
            ) from None
        except Exception as error:  # `tokenizers` raises bare Exception for files it cannot read
            fix = "" if isinstance(error, DataError) else ". Copy or download it again."
            raise DataError(f"cannot read the tokenizer in {path}: {error}{fix}") from error

    def save(self, folder: str | Path) -> None:
        """Writes the model and its settings to a folder, which `transformers` loads, too."""
        folder = Path(folder)
        files = {
            **self._backend.files(),
            # transformers reads the names from here, and the rest from the file below.
            "special_tokens_map.json": _json(self._backend.names),
            "tokenizer_config.json": _json(self._backend.settings),
        }
        # Files of another tokenizer, which `load` could prefer.
        for name in set(TOKENIZER_FILES).difference(files):
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            with atomic_write(folder / name) as file:
                file.write(content)

    def with_tokens(self, tokens: Sequence[str], whole_words: bool = False) -> Tokenizer:
        """Returns this tokenizer with further tokens, which get the ids after its own.

        Its own tokens keep their ids. Wherever a text has a new token, it is that token, as with
        `add_tokens` of `transformers`.

        Args:
            tokens: that are not in the vocabulary.
            whole_words: a new token is found only where no letter or digit is next to it.

        Raises:
            ConfigError: it is a SentencePiece model, whose file cannot hold them.
        """
        return Tokenizer(self._backend.with_tokens(tokens, whole_words))

    def with_content(self, tokens: Sequence[str]) -> Tokenizer:
        """Returns this tokenizer with tokens that are content: a text may hold them by name.

        All ids stay as they are.

        Args:
            tokens: special tokens without a role, or other tokens of the vocabulary.

        Raises:
            ConfigError: one has a role, as [SEP], or is not in the vocabulary; or it is a
                SentencePiece model, whose file cannot say so.
        """
        return Tokenizer(self._backend.with_content(tokens)) if tokens else self

    def extends(self, other: Tokenizer) -> bool:
        """Whether this is `other` with further tokens after its own; see `with_tokens`."""
        return self.vocabulary.size > other.vocabulary.size and self.keeps_ids(other)

    def keeps_ids(self, other: Tokenizer) -> bool:
        """Whether this is `other`, but for further tokens and for those that are content."""
        from data_pipeline.tokenizers.huggingface import HuggingFace

        ours, theirs = self._backend, other._backend
        if not (isinstance(ours, HuggingFace) and isinstance(theirs, HuggingFace)):
            return False
        return ours.keeps_ids(theirs)

    def normalized(self, text: str) -> str:
        """Returns a text as it is before it is split into tokens, in lower case for example."""
        with failures_explained():
            return self._backend.normalized(text)

    def has(self, token: str) -> bool:
        """Whether the vocabulary has a token of this spelling or of its normalized form."""
        with failures_explained():
            return self._backend.has(token)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 of everything that determines the ids of a text."""
        return self._backend.fingerprint()

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, without special tokens.

        Their type is the narrowest unsigned one that holds the vocabulary.
        """
        with failures_explained():
            return self._backend.encode(texts)

    def encode_prompts(self, texts: Sequence[str]) -> list[Tokens]:
        """Returns the ids of each text, as `encode_batch`, with sentinels as tokens.

        A user who writes "<extra_id_0>" in a prompt means T5's sentinel, as for `transformers`.
        Text between sentinels is encoded by itself, so each part begins a word.
        """
        sentinels = {self.token(token): token for token in self.vocabulary.sentinels}
        if not sentinels:
            return self.encode_batch(texts)
        # "a <extra_id_0> b" is split into "a ", "<extra_id_0>" and " b": names at odd indices.
        pattern = re.compile(f"({'|'.join(map(re.escape, sentinels))})")
        split = [pattern.split(text) for text in texts]
        between = iter(self.encode_batch([part for parts in split for part in parts[::2]]))
        prompts = []
        for parts in split:
            first, *others = (next(between) for _ in parts[::2])
            named = [np.array([sentinels[name]], first.dtype) for name in parts[1::2]]
            pairs = zip(named, others, strict=True)
            prompts.append(np.concatenate([first, *itertools.chain.from_iterable(pairs)]))
        return prompts

    def encode_aligned(self, texts: Sequence[str]) -> list[Aligned]:
        """Returns the ids of each text, as `encode_batch`, and the characters of each token.

        Returns:
            For each text its T ids and int64 [T, 2], the (begin, end) of each token as indices into
            the text, without white space around it. Tokens that share a character both have it;
            begin and end are equal for tokens of white space alone. Both columns are ascending.
        """
        with failures_explained():
            return self._backend.encode_aligned(texts)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """Returns the text of `ids`, special tokens included."""
        with failures_explained():
            return self._backend.decode([int(i) for i in ids])

    def token(self, token_id: int) -> str:
        """Returns a token as the vocabulary spells it; "<id>" for an id without token."""
        return self._backend.token(int(token_id)) or f"<{token_id}>"

    def spellings(self) -> list[str]:
        """Returns all tokens as the vocabulary spells them, by id.

        The tokens that begin and end a text are spelled as the ASCII characters for that, STX and
        ETX, which no text contains.
        """
        found = [self.token(token_id) for token_id in range(self.vocabulary.size)]
        vocabulary = self.vocabulary
        if vocabulary.cls is not None:
            # By role, as tokenizers spell them differently ([CLS], <s>).
            found[vocabulary.cls] = "\x02"
        if vocabulary.end is not None:
            found[vocabulary.end] = "\x03"
        return found


def _read_backend(path: Path, saved: bool) -> Backend:
    if path.is_file():
        from data_pipeline.tokenizers.sentencepiece import SentencePiece

        return SentencePiece(read_regular(path), {})
    settings = read_settings(path)
    # The tokenizer.json beside it was made for other programs; the model itself decides.
    if settings.get(CONVERTED_FROM) == SPIECE and (path / SPIECE).is_file():
        return _read_sentencepiece(path, settings, saved)
    from data_pipeline.tokenizers.huggingface import HuggingFace, read_saved

    try:
        if saved:
            backend = read_saved(path)
        else:
            from data_pipeline.tokenizers.foreign_settings import class_name, with_names
            from data_pipeline.tokenizers.huggingface_models import read

            settings = with_names(class_name(path, settings), settings)
            backend = read(path, settings)
    # None of the files that Hugging Face reads is there.
    except FileNotFoundError:
        return _read_sentencepiece(path, settings, saved)
    return HuggingFace(backend, settings)


def _read_sentencepiece(folder: Path, settings: Tree, saved: bool) -> SentencePiece:
    from data_pipeline.tokenizers.sentencepiece import SentencePiece

    content = read_regular(folder / SPIECE)
    if saved:
        return SentencePiece(content, settings)
    from data_pipeline.tokenizers.foreign_settings import (
        added_tokens,
        check_sentencepiece,
        class_name,
    )

    kind = class_name(folder, settings)
    if kind is not None and not settings.get("tokenizer_class"):
        settings = {**settings, "tokenizer_class": kind}
    backend = SentencePiece(content, settings)
    backend.check_sentinels()
    added = added_tokens(folder, settings)
    check_sentencepiece(backend, kind, settings, added)
    return backend


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
