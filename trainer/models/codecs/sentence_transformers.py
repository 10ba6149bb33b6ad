"""How a folder of `sentence-transformers` makes a vector of a text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, cast, get_args

from samestep.errors import CheckpointError, ConfigError
from samestep.stored_json import damage_of, read_json
from samestep.untrusted import inside
from trainer.models.codecs import sparse_encoders
from trainer.models.pooling import ROLES, Pool, Similarity, TextPool

T = TypeVar("T")

_MODULES = ["Transformer", "Pooling", "Normalize"]
_POOLS: Mapping[str, Pool] = {
    "mean": "mean",
    "cls": "first",
    "lasttoken": "last",
    "max": "max",
    "weightedmean": "weighted",
}
"""By the names of sentence-transformers."""
_FLAG = "pooling_mode_"  # of a mode, in folders of version 5 and less: pooling_mode_cls_token
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")
_FIX = "With --pool, vectors are pooled hidden states of the encoder alone"


class _Transformer(TypedDict, total=False):
    max_seq_length: int | float | None
    do_lower_case: bool
    transformer_task: str


class _Tokenizer(TypedDict, total=False):
    model_max_length: int | float | None


class _Settings(TypedDict, total=False):
    prompts: dict[str, str] | None
    default_prompt_name: str | None
    similarity_fn_name: str | None
    max_active_dims: int | None


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text become its vector.

    Attributes:
        pool: see `trainer.models.pooling`.
        normalize: whether vectors have length 1.
        longest: maximum number of tokens, special ones included; None is the model's.
        query, document: prepended to texts of these roles.
        default: prepended to texts without a role, whose similarity is symmetric.
        lower: whether texts are lower-cased.
        similarity: what compares two vectors.
    """

    pool: TextPool = "mean"
    normalize: bool = True
    longest: int | None = None
    query: str = ""
    document: str = ""
    default: str = ""
    lower: bool = False
    similarity: Similarity = "cosine"

    @classmethod
    def of(cls, folder: Path, pool: TextPool | None = None) -> Pooling | None:
        """Reads the settings of a folder; None if it is not of `sentence-transformers`.

        Args:
            pool: replaces the folder's, which may be one that samestep does not compute.

        Raises:
            CheckpointError: a file is damaged or missing.
            ConfigError: it has a module or setting that samestep does not compute.
        """
        modules_file = file = inside(folder, "modules.json")
        if not file.is_file():
            return None
        modules = _read(file, list[dict[str, object]])
        kinds = [str(module.get("type")) for module in modules]
        is_sparse = sparse_encoders.is_sparse(kinds)
        for number, module in enumerate(modules):
            kind = kinds[number]
            name = kind.rpartition(".")[2]
            is_known = kind.startswith("sentence_transformers.") and (
                is_sparse or [name] == _MODULES[number:][:1]
            )
            if not is_known or (number == 0 and module.get("path") != ""):
                raise ConfigError(
                    f"{file} has the module {kind} at place {number}, which samestep does not "
                    f"compute: it has Transformer, Pooling, Normalize in this order, or "
                    f"{', '.join(sparse_encoders.MODULES)}. Remove modules.json to use the encoder "
                    "alone"
                )
        if len(modules) < 2:
            raise ConfigError(f"{file} has no module Pooling. Remove it to use the encoder alone")
        transformer = _optional(inside(folder, "sentence_bert_config.json"), _Transformer)
        file = inside(folder, "config_sentence_transformers.json")
        settings = _optional(file, _Settings)
        prompts, default = settings.get("prompts") or {}, settings.get("default_prompt_name")
        if default is not None and default not in prompts:
            raise CheckpointError(
                f"{file} has the prompts {prompts!r} and default_prompt_name {default!r}. Name one "
                "of them"
            )
        similarity = settings.get("similarity_fn_name") or ("dot" if is_sparse else "cosine")
        if similarity not in get_args(Similarity):
            raise ConfigError(
                f"{file} has similarity_fn_name {similarity!r}, which samestep does not compute. "
                "Set it to cosine or dot"
            )
        stored: TextPool
        own = inside(folder, f"{modules[1].get('path')}/config.json")
        if is_sparse and pool in (None, "splade"):
            content = _optional(own, dict[str, object])
            sparse_encoders.check(modules_file, kinds, transformer, content, settings)
            stored = "splade"
        else:
            stored = _pool(own, pool)
        return cls(
            stored,
            len(modules) > 2,
            _length(folder, transformer),
            prompts.get("query", ""),
            next((prompts[role] for role in _DOCUMENT_PROMPTS if role in prompts), ""),
            "" if default is None else prompts[default],
            transformer.get("do_lower_case", False),
            cast(Similarity, similarity),
        )

    @classmethod
    def of_objective(cls, settings: Mapping[str, Any]) -> Pooling:
        """How texts are embedded by a model that an objective with these settings has trained."""
        similarity: Similarity = settings.get("similarity") or "cosine"
        normalize = settings.get("normalize")
        return cls(
            settings.get("pool") or "mean",
            similarity == "cosine" if normalize is None else normalize,
            settings.get("max_length"),
            similarity=similarity,
            **(settings.get("prompts") or {}),
        )

    def settings(self) -> dict[str, Any]:
        """The settings of an objective that continues this pooling."""
        prompts = {role: getattr(self, role) for role in ROLES}
        return {
            "pool": self.pool,
            "normalize": self.normalize,
            "prompts": {role: prompt for role, prompt in prompts.items() if prompt},
            "max_length": self.longest,
            "similarity": self.similarity,
        }

    def __str__(self) -> str:
        return described(self.settings() | ({"lower": True} if self.lower else {}))

    def with_default_prompt(self, text: str) -> str:
        """A text as it is read without a role."""
        text = self.default + text
        return text.lower() if self.lower else text


def described(settings: Mapping[str, object]) -> str:
    """Formats settings of pooling for messages: "pool 'mean', normalize True"."""
    return ", ".join(f"{name} {value!r}" for name, value in settings.items() if value is not None)


def _pool(file: Path, instead: TextPool | None) -> TextPool:
    """The pooling that 1_Pooling/config.json describes, or the one in its place."""
    if not file.is_file():
        raise CheckpointError(f"{file} is missing. Copy the folder again")
    content = _read(file, dict[str, object])
    if content.get("include_prompt") is False:
        raise ConfigError(
            f"{file} has include_prompt false, which leaves prompts out of the pooling. samestep "
            "does not compute that: set it to true"
        )
    if instead is not None:
        return instead
    modes = content.get("pooling_mode") or [
        name.removeprefix(_FLAG).removesuffix("s").removesuffix("_token")
        for name, is_set in content.items()
        if name.startswith(_FLAG) and is_set is True
    ]
    modes = [modes] if isinstance(modes, str) else modes
    if not isinstance(modes, list) or len(modes) != 1 or modes[0] not in _POOLS:
        raise ConfigError(
            f"{file} pools by {modes}, which samestep does not compute: it has "
            f"{', '.join(_POOLS)}. {_FIX}"
        )
    return _POOLS[modes[0]]


def _length(folder: Path, transformer: _Transformer) -> int | None:
    length = transformer.get("max_seq_length")
    if length is None:  # as newer versions save it
        tokenizer = _optional(inside(folder, "tokenizer_config.json"), _Tokenizer)
        length = tokenizer.get("model_max_length")
    if length is not None and length < 1:
        raise CheckpointError(f"{folder} has max_seq_length {length!r}. Write a number of tokens")
    return None if length is None else int(length)


def _optional(file: Path, schema: type[T]) -> T:
    return _read(file, schema) if file.is_file() else schema()


def _read(file: Path, schema: type[T]) -> T:
    with damage_of(file, CheckpointError, "Copy the folder again."):
        return read_json(file, schema)
