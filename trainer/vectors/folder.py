"""A folder of word vectors.

vectors.safetensors  "vectors", fp32 [V, D]; with units tokens also "tokens", int64 [V]
words.txt            V lines, from the most frequent word on
vectors.json         the settings, and which dataset and tokenizer the vectors are of
tokenizer/           the tokenizer
vectors.txt          with --text: the format of word2vec, which gensim reads
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypedDict

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor

from data_pipeline.tokenizers.tokenizer import Tokenizer
from samestep.errors import ConfigError, DataError
from samestep.storage import atomic_write, write_text
from samestep.stored_json import Count, read_json
from samestep.untrusted import open_regular, read_regular, regular
from trainer.vectors.corpus import words_in

DESCRIPTION = "vectors.json"
_TENSORS = "vectors.safetensors"
_WORDS_AT_A_TIME = 4096


class _Settings(TypedDict):
    dimensions: Count
    method: str


class _Description(TypedDict):
    settings: _Settings


@dataclass(frozen=True)
class WordVectors:
    """Vectors of words, from the most frequent one on.

    Attributes:
        words: V words, or tokens as the vocabulary spells them.
        vectors: fp32 [V, D].
        tokens: int64 [V], the token of each one; None unless the units are tokens.
        description: of the settings, dataset and tokenizer; see `vectors.json`.
        tokenizer: of the dataset.
        folder: where they were read; None if they are new.
    """

    words: list[str]
    vectors: Tensor
    tokens: Tensor | None
    description: dict[str, Any]
    tokenizer: Tokenizer
    folder: Path | None = None

    @classmethod
    def load(cls, folder: str | Path) -> WordVectors:
        """Reads a folder.

        Raises:
            DataError: it is no such folder, or damaged.
        """
        folder = Path(folder)
        check(folder)
        try:
            description: dict[str, Any] = dict(read_json(folder / DESCRIPTION, _Description))
            # Only \n: a word may hold a character that splitlines() takes for a line's end.
            words = read_regular(folder / "words.txt").decode().split("\n")[:-1]
            tensors = load_file(regular(folder / _TENSORS))
            vectors = tensors["vectors"]
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            raise DataError(
                f"cannot read the word vectors in {folder}: {error}. Copy the folder again."
            ) from error
        # Three files that may come from different folders.
        if vectors.shape != (len(words), description["settings"]["dimensions"]):
            raise DataError(
                f"{folder} has {len(words)} words and vectors of the shape "
                f"{tuple(vectors.shape)}, which do not belong together. Copy the folder again."
            )
        if not vectors.isfinite().all():
            raise DataError(
                f"{folder / _TENSORS} holds NaN or infinity. Copy the folder again, or train the "
                "vectors again."
            )
        tokenizer = Tokenizer.load(folder / "tokenizer", saved=True)
        return cls(words, vectors, tensors.get("tokens"), description, tokenizer, folder)

    @cached_property
    def origin(self) -> dict[str, str]:
        """The path of the folder, and the hex SHA-256 of its vectors, which tells it from others.

        Raises:
            DataError: it cannot be read anymore.
        """
        assert self.folder is not None, "new vectors have no folder"
        try:
            with open_regular(self.folder / _TENSORS) as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:
            raise DataError(
                f"cannot read the word vectors in {self.folder}: {error}. Copy the folder again."
            ) from error
        return {"path": str(self.folder), "identity": digest}

    def save(self, folder: Path, text: bool) -> None:
        """Writes a folder; `text` adds the format of word2vec."""
        tensors = {"vectors": self.vectors.contiguous()}
        if self.tokens is not None:
            tensors["tokens"] = self.tokens
        with atomic_write(folder / _TENSORS) as file:
            file.write(save(tensors))
        write_text(folder / "words.txt", "".join(f"{_spelled(word)}\n" for word in self.words))
        self.tokenizer.save(folder / "tokenizer")
        if text:
            with atomic_write(folder / "vectors.txt") as file:
                for line in self._text_lines():
                    file.write(line.encode())
        # The description makes it a folder of word vectors, so it comes last.
        write_text(folder / DESCRIPTION, json.dumps(self.description, indent=1) + "\n")

    def _text_lines(self) -> Iterator[str]:
        yield f"{len(self.words)} {self.vectors.shape[1]}\n"
        for first in range(0, len(self.words), _WORDS_AT_A_TIME):
            rows = self.vectors[first : first + _WORDS_AT_A_TIME].tolist()
            words = self.words[first : first + _WORDS_AT_A_TIME]
            for word, row in zip(words, rows, strict=True):
                # 9 digits tell any two numbers of 32 bits apart.
                yield " ".join([_spelled(word), *(f"{value:.9g}" for value in row)]) + "\n"

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.words)}

    @cached_property
    def _of_tokens(self) -> dict[int, int]:
        assert self.tokens is not None
        return {token: number for number, token in enumerate(self.tokens.tolist())}

    def find(self, text: str) -> list[int]:
        """The numbers of the words, or tokens, of a text; one that has no vector is left out.

        Raises:
            ConfigError: none of them has a vector.
        """
        if self.tokens is not None:
            tokens = self.tokenizer.encode_batch([text])[0].tolist()
            found = [self._of_tokens[token] for token in tokens if token in self._of_tokens]
            unknown = text
        else:
            words = words_in(text, self.tokenizer)
            found = [self._numbers[word] for word in words if word in self._numbers]
            unknown = next((word for word in words if word not in self._numbers), text)
        if found:
            return found
        # A misspelled word, or one that is there in another form only.
        like = difflib.get_close_matches(unknown, self.words, n=3)
        hint = f"; it has {', '.join(like)}" if like else ""
        raise ConfigError(
            f"the word {unknown!r} is not among the {len(self.words)} of {self.folder}{hint}. "
            "Choose another word, or train vectors with a lower --min-count."
        )

    def nearest(self, numbers: list[int], top: int) -> list[tuple[float, str]]:
        """Returns (cosine, word) of those nearest to the mean of some words, these excluded."""
        found = nearest(self.vectors, numbers, numbers, top)
        return [(cosine, self.words[number]) for cosine, number in found]


def nearest(
    table: Tensor, rows: list[int], excluded: list[int], top: int
) -> list[tuple[float, int]]:
    """Returns (cosine, row) of the rows of a table that are nearest to the mean of some rows.

    Args:
        table: fp32 [V, D].
    """
    # Dividing by the smallest normal number keeps the zero vectors of unused tokens at 0.
    unit = table / table.norm(dim=1, keepdim=True).clamp(min=torch.finfo(table.dtype).tiny)
    vector = table[rows].mean(0)
    cosines = unit @ (vector / vector.norm())
    # The nearest to a word is that word.
    cosines[excluded] = -torch.inf
    found, ids = cosines.topk(min(top, len(cosines)))
    return [(c, i) for c, i in zip(found.tolist(), ids.tolist(), strict=True) if c > -torch.inf]


def is_folder(path: str | Path) -> bool:
    """Whether a path is a folder of word vectors."""
    return (Path(path) / DESCRIPTION).is_file()


def check(folder: str | Path) -> None:
    """Checks that a path is a folder of word vectors, without reading it.

    Raises:
        DataError: it is not.
    """
    if not is_folder(folder):
        raise DataError(
            f"{folder} is not a folder of word vectors: it has no {DESCRIPTION}. Make one with: "
            "samestep vectors DATASET --method skipgram --output FOLDER"
        )


def _spelled(word: str) -> str:
    """A word for a text file, where white space ends it; only added tokens have some."""
    return re.sub(r"\s", "_", word)
