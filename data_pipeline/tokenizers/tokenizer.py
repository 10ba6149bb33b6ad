"""Tokenizers: WordPiece, byte-level BPE and SentencePiece trained here, or any that their libraries
can run.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers import huggingface, sentencepiece
from trainer.config import Tree
from trainer.config.sizes import parse_size
from trainer.errors import ConfigError, DataError
from trainer.examples import Vocabulary
from trainer.storage import atomic_write, hub


@dataclass(frozen=True)
class Config:
    """Where the tokenizer is and, for `samestep data tokenizer`, how it is trained.

    Attributes:
        path: its folder, a SentencePiece model, or hf://NAME[@REVISION] on the Hugging Face Hub.
        algorithm: "wordpiece" (BERT); "bpe" (byte-level, RoBERTa and GPT-2); or SentencePiece's
            "unigram" (T5) or "sentencepiece_bpe".
        vocab_size: number of ids, special tokens included, but not `sentinels`.
        lowercase: lower-case the text and, for WordPiece, strip its accents (BERT "uncased").
        min_frequency: pieces seen less often are not merged; not for SentencePiece.
        sample: share of the documents, chosen by hash, that it is trained on.
        sample_size: for SentencePiece, which has its text in memory: most text that it is trained
            on, chosen by hash.
        character_coverage: for SentencePiece: share of the text's characters that get a piece, the
            most frequent ones; 0.98 to 1.
        byte_fallback: for SentencePiece: spell other characters as bytes instead of <unk>.
        sentinels: for SentencePiece: tokens <extra_id_0>, ... that stand for spans of text, as T5's
            objective needs.
    """

    path: str
    algorithm: Literal["wordpiece", "bpe", "unigram", "sentencepiece_bpe"] = "wordpiece"
    vocab_size: int = 30_522
    lowercase: bool = False
    min_frequency: int = 2
    sample: float = 1.0
    sample_size: str = "100MB"
    character_coverage: float = 0.9995
    byte_fallback: bool = False
    sentinels: int = 100

    def __post_init__(self) -> None:
        # The special tokens and, of byte-level BPE, 256 bytes; SentencePiece's, and a piece.
        least = {"wordpiece": 6, "bpe": 261}.get(self.algorithm, 260 if self.byte_fallback else 4)
        if not least <= self.vocab_size <= 2**31:
            raise ConfigError(
                f"vocab_size must be at least {least} for {self.algorithm}, not {self.vocab_size}"
            )
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample is a share of the documents in (0, 1], not {self.sample}")
        parse_size(self.sample_size, "sample_size")
        if not 0.98 <= self.character_coverage <= 1:
            raise ConfigError(
                f"character_coverage is a share from 0.98 to 1, not {self.character_coverage}"
            )
        if self.sentinels < 0:
            raise ConfigError(f"sentinels must be at least 0, not {self.sentinels}; T5 has 100")

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Trains a tokenizer.

        Two trainings on the same text may differ (`tokenizers` counts in parallel and breaks ties
        by chance), so a tokenizer is an input of a dataset, never made on the side.

        Raises:
            ConfigError: SentencePiece cannot train a vocabulary of this size on the text.
            DataError: there is no text for it.
        """
        if self.algorithm == "unigram" or self.algorithm == "sentencepiece_bpe":
            model = sentencepiece.train(
                texts,
                "unigram" if self.algorithm == "unigram" else "bpe",
                self.vocab_size,
                self.lowercase,
                self.character_coverage,
                self.byte_fallback,
                parse_size(self.sample_size, "sample_size"),
            )
            return Tokenizer(sentencepiece.SentencePiece(model, {"extra_ids": self.sentinels}))
        train = (
            huggingface.train_wordpiece if self.algorithm == "wordpiece" else huggingface.train_bpe
        )
        return Tokenizer(
            huggingface.HuggingFace(
                train(texts, self.vocab_size, self.lowercase, self.min_frequency), {}
            )
        )


class Backend(Protocol):
    """What runs a tokenizer: a library and its model.

    Attributes:
        vocabulary: its size and special tokens.
        fingerprint: hex SHA-256 over all that fixes which ids a text gets.
        names: its special tokens as transformers names their roles, such as pad_token.
        settings: tokenizer_config.json, as transformers reads it.
    """

    vocabulary: Vocabulary
    names: dict[str, str]
    settings: Tree

    @property
    def fingerprint(self) -> str: ...

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens, in the narrowest unsigned type that holds
        the vocabulary.
        """

    def encode_aligned(self, texts: Sequence[str]) -> list[tuple[Tokens, npt.NDArray[np.int64]]]:
        """The ids of each text as `encode` gives them, and int64 [T, 2], the (begin, end)
        characters of each token.
        """

    def decode(self, ids: list[int]) -> str:
        """The text of `ids`, special tokens included."""

    def token(self, token_id: int) -> str | None:
        """The token of an id; None for an id without."""

    def files(self) -> dict[str, bytes]:
        """The model's files, by name."""


class Tokenizer:
    """Text to ids and back. No text can produce a special token: "[MASK]" in a document is a word
    in brackets.

    Attributes:
        vocabulary: its size and special tokens, for the objectives.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.vocabulary = backend.vocabulary

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Reads a tokenizer.

        Args:
            path: a folder with tokenizer.json (Hugging Face), vocab.txt (BERT), vocab.json and
                merges.txt (GPT-2), or spiece.model (T5), the first of these that is there; a
                SentencePiece model; or hf://NAME.

        Raises:
            DataError: there is none of these, or it cannot be read.
            StorageError: it cannot be downloaded.
        """
        path = hub.tokenizer_folder(str(path)) if hub.is_hub_path(str(path)) else Path(path)
        try:
            if path.is_file():
                return cls(sentencepiece.SentencePiece(path.read_bytes(), {}))
            settings = {
                **_read_json(path / "special_tokens_map.json"),
                **_read_json(path / "tokenizer_config.json"),
            }
            return cls(_read_backend(path, settings))
        except FileNotFoundError:
            raise DataError(
                f"there is no tokenizer in {path}: it holds neither tokenizer.json, nor vocab.txt, "
                "nor vocab.json "
                f"with merges.txt, nor spiece.model; train one with: samestep data tokenizer CONFIG"
            ) from None
        except Exception as error:  # `tokenizers` raises bare Exception for files it cannot read
            raise DataError(f"cannot read the tokenizer in {path}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Writes the model, tokenizer_config.json and special_tokens_map.json, which `transformers`
        loads too.
        """
        folder = Path(folder)
        files = {
            **self._backend.files(),
            "special_tokens_map.json": _json(self._backend.names),
            "tokenizer_config.json": _json(self._backend.settings),
        }
        for name in set(hub.TOKENIZER_FILES).difference(
            files
        ):  # of another tokenizer, which `load` could prefer
            (folder / name).unlink(missing_ok=True)
        for name, content in files.items():
            with atomic_write(folder / name) as file:
                file.write(content)

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over all that fixes which ids a text gets."""
        return self._backend.fingerprint

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens, in the narrowest unsigned type that holds
        the vocabulary.
        """
        return self._backend.encode(texts)

    def encode_aligned(self, texts: Sequence[str]) -> list[tuple[Tokens, npt.NDArray[np.int64]]]:
        """The ids of each text as `encode_batch` gives them, and the characters that its tokens
        stand for.

        Returns:
            For each text its T ids and int64 [T, 2], the (begin, end) of each token as indices of
            the text, without white space around it. Tokens that share a character have the same
            one; of those that stand for nothing but white space begin and end are equal. Both are
            ascending.
        """
        return self._backend.encode_aligned(texts)

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of `ids`, special tokens included."""
        return self._backend.decode([int(i) for i in ids])

    def token(self, token_id: int) -> str:
        """The token of an id as the vocabulary spells it; an id without token reads <id>."""
        return self._backend.token(int(token_id)) or f"<{token_id}>"


def _read_backend(folder: Path, settings: Tree) -> Backend:
    try:
        return huggingface.HuggingFace(huggingface.read(folder, settings), settings)
    except FileNotFoundError:
        return sentencepiece.SentencePiece((folder / sentencepiece.MODEL).read_bytes(), settings)


def _read_json(path: Path) -> Tree:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json(content: Mapping[str, object]) -> bytes:
    return (json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode()
