"""Tokenizers: WordPiece and byte-level BPE trained here, or any that Hugging Face's `tokenizers` can run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from data_pipeline.manifest import token_dtype
from data_pipeline.shards import Tokens
from data_pipeline.words import WordEncoder, ends_tokens_with_words
from trainer import hub
from trainer.errors import ConfigError, DataError
from trainer.examples import Vocabulary
from trainer.storage import write_text

_BERT_SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
_ROBERTA_SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]  # <mask> is the last id of RoBERTa's vocabulary
_ALPHABET_LIMIT = 1000  # distinct characters a WordPiece vocabulary spells words with, as for BERT's own

# What a special token is called where the tokenizer's settings do not say.
_USUAL_NAMES = {
    "pad": ("[PAD]", "<pad>"),
    "unk": ("[UNK]", "<unk>"),
    "cls": ("[CLS]", "<s>", "<|endoftext|>"),
    "sep": ("[SEP]", "</s>", "<|endoftext|>"),
    "mask": ("[MASK]", "<mask>"),
}


@dataclass(frozen=True)
class Config:
    """Where the tokenizer is and, for `samestep data tokenizer`, how it is trained.

    Attributes:
        path: its folder, or hf://NAME[@REVISION] on the Hugging Face Hub.
        algorithm: "wordpiece" (BERT) or "bpe" (byte-level, RoBERTa and GPT-2).
        vocab_size: number of ids, special tokens included.
        lowercase: lower-case the text and, for WordPiece, strip its accents (BERT "uncased").
        min_frequency: pieces seen less often are not merged.
        sample: share of the documents, chosen by hash, that it is trained on.
    """

    path: str
    algorithm: Literal["wordpiece", "bpe"] = "wordpiece"
    vocab_size: int = 30_522
    lowercase: bool = False
    min_frequency: int = 2
    sample: float = 1.0

    def __post_init__(self) -> None:
        least = 261 if self.algorithm == "bpe" else 6  # 256 bytes, special tokens
        if not least <= self.vocab_size <= 2**31:
            raise ConfigError(f"vocab_size must be at least {least} for {self.algorithm}, not {self.vocab_size}")
        if not 0 < self.sample <= 1:
            raise ConfigError(f"sample is a share of the documents in (0, 1], not {self.sample}")

    def train(self, texts: Iterable[str]) -> Tokenizer:
        """Trains a tokenizer.

        Two trainings on the same text may differ (`tokenizers` counts in parallel and breaks ties by chance), so a
        tokenizer is an input of a dataset, never made on the side.
        """
        if self.algorithm == "wordpiece":
            return Tokenizer(_train_wordpiece(texts, self), {})
        return Tokenizer(_train_bpe(texts, self), {})


def _train_wordpiece(texts: Iterable[str], config: Config) -> tokenizers.Tokenizer:
    backend = _wordpiece({token: i for i, token in enumerate(_BERT_SPECIAL)}, config.lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=_BERT_SPECIAL,
        show_progress=False,
        limit_alphabet=_ALPHABET_LIMIT,
    )
    backend.train_from_iterator(texts, trainer)
    _set_template(backend)
    return backend


def _train_bpe(texts: Iterable[str], config: Config) -> tokenizers.Tokenizer:
    backend = _byte_level_bpe(models.BPE())
    if config.lowercase:
        backend.normalizer = normalizers.Lowercase()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size - 1,
        min_frequency=config.min_frequency,
        special_tokens=_ROBERTA_SPECIAL,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([_mask_token("<mask>")])
    _set_template(backend)
    return backend


class Tokenizer:
    """Text to ids and back. No text can produce a special token: "[MASK]" in a document is a word in brackets.

    Attributes:
        vocabulary: its size and special tokens, for the objectives.
    """

    def __init__(self, backend: tokenizers.Tokenizer, settings: dict[str, Any]) -> None:
        """Wraps a tokenizer of the `tokenizers` package; `settings` is its tokenizer_config.json."""
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True
        self._backend = backend
        names = {role: _special_token(backend, settings, role) for role in _USUAL_NAMES}
        self._names = {f"{role}_token": name for role, name in names.items() if name is not None}
        self._settings = settings
        ids = {role: None if name is None else backend.token_to_id(name) for role, name in names.items()}
        special = {i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        special.update(i for i in ids.values() if i is not None)
        vocab = backend.get_vocab()
        self.vocabulary = Vocabulary(
            size=max(vocab.values(), default=-1) + 1,
            **{role: ids[role] for role in ("pad", "cls", "sep", "mask")},
            special=tuple(sorted(special)),
            continuing=_continuing(backend, vocab),
        )

    @cached_property
    def _words(self) -> WordEncoder | None:
        """The quick way to encode, where it is known to give the same ids."""
        if not ends_tokens_with_words(self._backend):
            return None
        return WordEncoder(self._backend, token_dtype(self.vocabulary.size))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads a Hugging Face tokenizer folder, BERT's `vocab.txt`, GPT-2's `vocab.json` and `merges.txt`, or hf://NAME.

        Raises:
            DataError: the folder holds none of these, or they cannot be read.
            StorageError: it cannot be downloaded.
        """
        folder = hub.tokenizer_folder(str(folder)) if hub.is_hub_path(str(folder)) else Path(folder)
        try:
            settings = {
                **_read_json(folder / "special_tokens_map.json"),
                **_read_json(folder / "tokenizer_config.json"),
            }
            return cls(_read_backend(folder, settings), settings)
        except FileNotFoundError:
            raise DataError(
                f"there is no tokenizer in {folder}: it holds neither tokenizer.json, nor vocab.txt, nor vocab.json "
                f"with merges.txt; train one with: samestep data tokenizer CONFIG"
            ) from None
        except Exception as error:  # `tokenizers` raises bare Exception for files it cannot read
            raise DataError(f"cannot read the tokenizer in {folder}: {error}") from error

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and special_tokens_map.json, which `transformers` loads too."""
        folder = Path(folder)
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._names, **self._settings}
        write_text(folder / "special_tokens_map.json", _json(self._names))
        write_text(folder / "tokenizer_config.json", _json(settings))
        write_text(folder / "tokenizer.json", self._backend.to_str(pretty=True))

    @cached_property
    def fingerprint(self) -> str:
        """Hex SHA-256 over all that fixes which ids a text gets, the same for every version of `tokenizers`."""
        content = json.loads(self._backend.to_str())
        parts = [_explicit(content[part]) for part in ("model", "normalizer", "pre_tokenizer", "added_tokens")]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()

    def encode_batch(self, texts: Sequence[str]) -> list[Tokens]:
        """The ids of each text, without special tokens, in the narrowest unsigned type that holds the vocabulary."""
        if self._words is not None:
            return self._words.encode_batch(texts)
        dtype = token_dtype(self.vocabulary.size)
        encodings = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype) for encoding in encodings]

    def decode(self, ids: Sequence[int] | Tokens) -> str:
        """The text of `ids`, special tokens included."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def token(self, token_id: int) -> str:
        """The token of an id as the vocabulary spells it; an id without token reads <id>."""
        return self._backend.id_to_token(int(token_id)) or f"<{token_id}>"


def _special_token(backend: tokenizers.Tokenizer, settings: dict[str, Any], role: str) -> str | None:
    fallback = {"cls": "bos_token", "sep": "eos_token"}.get(role, "")
    named = [settings.get(f"{role}_token"), *_USUAL_NAMES[role], settings.get(fallback)]
    names = [name["content"] if isinstance(name, dict) else name for name in named]
    return next((name for name in names if name and backend.token_to_id(name) is not None), None)


def _continuing(backend: tokenizers.Tokenizer, vocab: dict[str, int]) -> tuple[int, ...] | None:
    """The ids of the tokens that go on with a word; None where neither they nor those that begin one are marked."""
    if isinstance(backend.model, models.WordLevel):
        return ()
    if isinstance(backend.model, models.WordPiece):
        mark = backend.model.continuing_subword_prefix
        return tuple(sorted(i for token, i in vocab.items() if token.startswith(mark)))
    kind = str(backend.pre_tokenizer)
    mark = "Ġ" if "ByteLevel" in kind else "▁" if "Metaspace" in kind else ""
    return tuple(sorted(i for token, i in vocab.items() if not token.startswith(mark))) if mark else None


def _read_backend(folder: Path, settings: dict[str, Any]) -> tokenizers.Tokenizer:
    if (folder / "tokenizer.json").is_file():
        return tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    if (folder / "vocab.txt").is_file():
        tokens = (folder / "vocab.txt").read_text(encoding="utf-8").rstrip("\n").split("\n")
        cased = any(token != token.lower() for token in tokens if not token.startswith("["))
        backend = _wordpiece({t: i for i, t in enumerate(tokens)}, settings.get("do_lower_case", not cased))
    elif (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        backend = _byte_level_bpe(models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt")))
    else:
        raise FileNotFoundError(folder)
    known = {name for names in _USUAL_NAMES.values() for name in names if backend.token_to_id(name) is not None}
    backend.add_special_tokens([_mask_token(name) if name == "<mask>" else name for name in sorted(known)])
    _set_template(backend)
    return backend


def _mask_token(name: str) -> tokenizers.AddedToken:
    """RoBERTa's mask takes the place of a word with the space before it, which its vocabulary counts as the word's."""
    return tokenizers.AddedToken(name, lstrip=True, special=True)


def _wordpiece(vocab: dict[str, int], lowercase: bool) -> tokenizers.Tokenizer:
    """As BERT's own tokenizer (Devlin et al. 2019)."""
    backend = tokenizers.Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    return backend


def _byte_level_bpe(model: models.BPE) -> tokenizers.Tokenizer:
    """As GPT-2's tokenizer (Radford et al. 2019): every byte is in the vocabulary, so nothing is unknown."""
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _set_template(backend: tokenizers.Tokenizer) -> None:
    """Sets how `transformers` wraps a sequence in special tokens; the pipeline leaves that to the objectives."""
    for cls, sep, template in (
        ("[CLS]", "[SEP]", processors.BertProcessing),
        ("<s>", "</s>", processors.RobertaProcessing),
    ):
        cls_id, sep_id = backend.token_to_id(cls), backend.token_to_id(sep)
        if cls_id is not None and sep_id is not None:
            backend.post_processor = template((sep, sep_id), (cls, cls_id))
            return


def _explicit(settings: Any) -> Any:
    """Leaves out what is null, false or empty text, at any depth: so new versions write settings that old ones lack."""
    if isinstance(settings, dict):
        return {k: _explicit(v) for k, v in settings.items() if not (v is None or v is False or v == "")}
    return [_explicit(entry) for entry in settings] if isinstance(settings, list) else settings


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def _json(content: Any) -> str:
    return json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
