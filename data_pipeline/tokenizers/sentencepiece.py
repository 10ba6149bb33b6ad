"""SentencePiece (Kudo and Richardson 2018).

The tokenizers of T5, trained and run by Google's own library.
"""

from __future__ import annotations

import hashlib
import heapq
import io
import itertools
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from types import ModuleType
from typing import Literal

import numpy as np
import numpy.typing as npt
import sentencepiece
from google.protobuf.message import DecodeError, Message
from sentencepiece import sentencepiece_model_pb2, sentencepiece_pb2

from data_pipeline.format.manifest import token_dtype
from data_pipeline.format.shards import Tokens
from data_pipeline.tokenizers.alignment import trim
from trainer.config import Tree
from trainer.errors import ConfigError, DataError
from trainer.examples import Vocabulary

MODEL = "spiece.model"  # what transformers calls the file

_protocol: ModuleType = sentencepiece_model_pb2  # their classes are made when they are imported
_encoded: ModuleType = sentencepiece_pb2
_SPACE = "▁"  # begins the first piece of a word
_SENTINELS_OF_T5 = 100
# Classes of transformers. Others than these shift the ids of their model, or change the text
# before.
_OF_T5 = ("T5Tokenizer", "T5TokenizerFast")
_OF_ANY = "PreTrainedTokenizerFast"
_LONGEST_LINE = 2**30  # bytes; SentencePiece leaves out longer ones, its own default being 4,192


def train(
    texts: Iterable[str],
    model: Literal["unigram", "bpe"],
    vocab_size: int,
    lowercase: bool,
    character_coverage: float,
    byte_fallback: bool,
    sample_bytes: int,
) -> bytes:
    """Trains a model with T5's normalisation (NFKC, white space as single spaces) and special
    tokens.

    The same texts, in any order, give the same model.

    Args:
        texts: documents.
        model: kind of model.
        vocab_size: pieces, of which 0 is <pad>, 1 </s> and 2 <unk>.
        lowercase: fold the case of the text, here and whenever the model is used.
        character_coverage: share of the text's characters that get a piece, the most frequent ones.
        byte_fallback: spell other characters as bytes, for which there are 256 pieces, instead of
            <unk>.
        sample_bytes: text that is used; all of it is in memory at a time.

    Raises:
        ConfigError: the text has too few different pieces, or too many different characters, for
            such a vocabulary.
        DataError: there is no text.
    """
    # In lines, the usual input of SentencePiece: no piece is made of a word that is followed by a
    # space throughout.
    lines = itertools.chain.from_iterable(text.splitlines() for text in sample(texts, sample_bytes))
    content = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(line for line in lines if line.strip()),
            model_writer=content,
            model_type=model,
            vocab_size=vocab_size,
            character_coverage=character_coverage,
            byte_fallback=byte_fallback,
            normalization_rule_name="nmt_nfkc_cf" if lowercase else "nmt_nfkc",
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            max_sentence_length=_LONGEST_LINE,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise _explained(str(error)) from error
    return content.getvalue()


def sample(texts: Iterable[str], size: int) -> list[str]:
    """Chooses texts by their hashes, those with the lowest, up to `size` bytes together.

    But one at least.

    Returns:
        The texts in the order of their hashes, so that it does not depend on the order in which
        they came.
    """
    chosen, total, bound = list[tuple[int, str]](), 0, -(2**64)
    for text in texts:
        content = text.encode()
        rank = -int.from_bytes(hashlib.blake2b(content, digest_size=8).digest())
        if rank < bound:  # a lower hash has been left out already
            continue
        heapq.heappush(chosen, (rank, text))
        total += len(content)
        while total > size and len(chosen) > 1:
            bound, last = heapq.heappop(chosen)
            total -= len(last.encode())
    return [text for _, text in sorted(chosen, reverse=True)]


def _explained(reason: str) -> Exception:
    if most := re.search(r"Vocabulary size too high \((\d+)\).* <= (\d+)", reason):
        return ConfigError(
            f"the text has too few different pieces for vocab_size {most[1]}; use at most "
            f"{most[2]}, or train on more "
            "text (sample, sample_size, limit)"
        )
    if least := re.search(r"smaller than required_chars\. (\d+) vs (\d+)", reason):
        return ConfigError(
            f"vocab_size {least[1]} is too small for the characters of the text, which with the "
            "special tokens are "
            f"{least[2]}; raise it, or lower character_coverage"
        )
    if "sentences_.empty()" in reason:
        return DataError(
            "the source holds no text to train a tokenizer on; correct source, or raise sample"
        )
    return DataError(f"SentencePiece cannot be trained on this source: {reason}")


class SentencePiece:
    """A SentencePiece model and the sentinels on top of it.

    See `data_pipeline.tokenizers.tokenizer.Backend`.

    As in T5, <extra_id_0> has the highest id and the other sentinels follow downwards. How many
    there are is `extra_ids` in the settings.

    Args:
        content: of the model's file.
        settings: the tokenizer_config.json beside it.

    Raises:
        DataError: the file is damaged, or the model is of a kind that transformers does not use as
            it is.
    """

    def __init__(self, content: bytes, settings: Tree) -> None:
        model = _parse(content)
        kind = settings.get("tokenizer_class")
        if kind not in (None, _OF_ANY, *_OF_T5):
            raise DataError(
                f"{kind} of transformers changes the ids of its {MODEL}; convert it to "
                "tokenizer.json, with "
                "AutoTokenizer.from_pretrained(...).save_pretrained(DIR), and name that folder"
            )
        self._content = content
        self._processor = processor = sentencepiece.SentencePieceProcessor(model_proto=content)
        ids = {"pad": processor.pad_id(), "unk": processor.unk_id(), "cls": processor.bos_id()}
        ids["eos"] = ids["sep"] = processor.eos_id()
        pieces = [piece.piece for piece in model.pieces]
        sentinels = settings.get("extra_ids", _SENTINELS_OF_T5 if kind in _OF_T5 else 0)
        size = len(pieces) + sentinels
        self._special = {
            i: pieces[i]
            for i in range(len(pieces))
            if processor.is_control(i) or processor.is_unknown(i)
        }
        self._special.update((size - 1 - n, f"<extra_id_{n}>") for n in range(sentinels))
        self.vocabulary = Vocabulary(
            size=size,
            **{
                role: ids[role] if ids[role] >= 0 else None for role in ("pad", "cls", "sep", "eos")
            },
            mask=None,
            special=tuple(sorted(self._special)),
            continuing=tuple(i for i, piece in enumerate(pieces) if not piece.startswith(_SPACE)),
            sentinels=tuple(range(size - 1, len(pieces) - 1, -1)),
            between=1,
        )
        self.names = {
            f"{role}_token": pieces[ids[role]] for role in ("pad", "unk", "eos") if ids[role] >= 0
        }
        # The classes of T5 in transformers run unigram models only, and none of them bytes.
        plain = (
            model.trainer_spec.model_type == _protocol.TrainerSpec.UNIGRAM
            and not model.trainer_spec.byte_fallback
        )
        default = {"tokenizer_class": _OF_T5[0] if plain else _OF_ANY, "extra_ids": sentinels}
        self.settings = {**default, **self.names, **settings}
        self._dtype = token_dtype(size)

    @cached_property
    def fingerprint(self) -> str:
        """Of the file, and how many sentinels there are."""
        return hashlib.sha256(
            self._content + f"{len(self.vocabulary.sentinels)}".encode()
        ).hexdigest()

    def encode(self, texts: Sequence[str]) -> list[Tokens]:
        # Word by word, as `words` does it, is half as fast: the library itself is quicker than
        # looking words up.
        return [
            np.array(ids, self._dtype) for ids in self._processor.encode(list(texts), num_threads=1)
        ]

    def encode_aligned(self, texts: Sequence[str]) -> list[tuple[Tokens, npt.NDArray[np.int64]]]:
        encoded = self._processor.encode(list(texts), out_type="serialized_proto", num_threads=1)
        return [self._align(text, content) for text, content in zip(texts, encoded, strict=True)]

    @cached_property
    def _kinds(self) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
        """Which pieces are nothing but spaces, and which are bytes."""
        pieces = range(self._processor.get_piece_size())
        spaces = [self._processor.id_to_piece(i).strip(_SPACE) == "" for i in pieces]
        return np.array(spaces, dtype=np.bool_), np.array(
            [self._processor.is_byte(i) for i in pieces], dtype=np.bool_
        )

    def _align(self, text: str, content: bytes) -> tuple[Tokens, npt.NDArray[np.int64]]:
        pieces = _encoded.SentencePieceText.FromString(content).pieces
        table = np.array(
            [(piece.id, piece.begin, piece.end) for piece in pieces], dtype=np.int64
        ).reshape(-1, 3)
        ids = table[:, 0]
        # It counts bytes of UTF-8, of which those that go on with a character begin with the bits
        # 10.
        is_first = np.frombuffer(text.encode(), dtype=np.uint8) & 0xC0 != 0x80
        whole = np.concatenate(([0], np.cumsum(is_first)))[table[:, 1:]]
        spans = trim(text, whole)
        # Of the pieces of a character, which are bytes or what it is normalised to, the library
        # gives it to the last.
        spaces, of_bytes = self._kinds
        is_space = spaces[ids] | (of_bytes[ids] & (whole[:, 0] < whole[:, 1]))
        part = (spans[:, 0] == spans[:, 1]) & ~is_space
        own = np.flatnonzero(~part)
        spans[part] = np.append(spans[own], [[len(text)] * 2], axis=0)[
            np.searchsorted(own, np.flatnonzero(part))
        ]
        return ids.astype(self._dtype), spans

    def decode(self, ids: list[int]) -> str:
        text = ""
        pieces = self._processor.get_piece_size()
        for is_text, run in itertools.groupby(ids, lambda i: i < pieces and i not in self._special):
            part = list(run)
            if is_text:
                # The library drops the space before the first word.
                text += (
                    " " if text and self._processor.id_to_piece(part[0]).startswith(_SPACE) else ""
                )
                text += self._processor.decode(part)
            else:
                text += "".join(self._special.get(i, "") for i in part)
        return text

    def token(self, token_id: int) -> str | None:
        if token_id < self._processor.get_piece_size():
            return self._processor.id_to_piece(token_id)
        return self._special.get(token_id)

    def files(self) -> dict[str, bytes]:
        return {MODEL: self._content}


def _parse(content: bytes) -> Message:
    try:
        model = _protocol.ModelProto.FromString(content)
    except DecodeError:
        model = _protocol.ModelProto()
    if not model.pieces or not model.HasField("normalizer_spec"):  # what comes last in the file
        raise DataError("it is damaged, or is no SentencePiece model; copy or download it again")
    return model
