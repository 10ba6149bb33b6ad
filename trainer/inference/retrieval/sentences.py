"""One vector for each text: a model's hidden states, pooled."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, TypedDict, cast, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from samestep.errors import CheckpointError, ConfigError
from samestep.stored_json import Count, JsonError, checked
from trainer.inference.hidden_states import TextEncoder, batches
from trainer.publish import sentence_transformers
from trainer.training.weights.loading import load_weights

Pool: TypeAlias = Literal["mean", "first", "last", "max", "weighted"]
Given: TypeAlias = Mapping[str, Any]
"""Attributes of `Pooling` that options have set."""
Similarity: TypeAlias = Literal["cosine", "dot"]

_MODES: Mapping[str, Pool] = {
    "mean": "mean",
    "cls": "first",
    "lasttoken": "last",
    "max": "max",
    "weightedmean": "weighted",
}
"""By the names of sentence-transformers."""
_FLAG = re.compile(
    r"pooling_mode_(.+?)(?:_tokens?)?"
)  # of a mode, in folders of version 5 and less
_DOCUMENT_PROMPTS = ("document", "passage", "corpus")


class _Transformer(TypedDict, total=False):
    max_seq_length: Count | None
    do_lower_case: bool


class _Prompts(TypedDict, total=False):
    prompts: dict[str, str]
    default_prompt_name: str | None
    similarity_fn_name: str | None


@dataclass(frozen=True)
class Pooling:
    """How the hidden states of a text become its vector.

    Attributes:
        pool: `mean` of all tokens; the `first` or `last` one; their `max`, number by number; or
            `weighted`, a mean in which the token at position i, from 1, counts i times.
        normalize: whether vectors have length 1.
        longest: maximum number of tokens, special ones included; None is the model's.
        query, document: prepended to texts of these roles.
        default: prepended to texts without a role, whose similarity is symmetric.
        lower: whether texts are lower-cased.
        similarity: what compares two vectors.
    """

    pool: Pool = "mean"
    normalize: bool = True
    longest: int | None = None
    query: str = ""
    document: str = ""
    default: str = ""
    lower: bool = False
    similarity: Similarity = "cosine"

    @classmethod
    def of(cls, folder: Path, pool: Pool | None = None) -> Pooling:
        """The settings in a folder of sentence-transformers; elsewhere, the default.

        Args:
            pool: replaces the folder's, which may be one that we do not have.

        Raises:
            ConfigError: its vectors are made in another way.
            CheckpointError: a file is damaged.
        """
        stored = sentence_transformers.stored(folder)
        if stored is None:
            return cls()
        modules, length, settings, pooling = (
            stored.get(name) or {} for name in sentence_transformers.FILES
        )
        try:
            prompts = checked(settings, _Prompts)
            transformer = checked(length, _Transformer)
        except JsonError as error:
            raise CheckpointError(
                f"settings of sentence-transformers in {folder}: {error}. Copy the folder again."
            ) from error
        similarity = prompts.get("similarity_fn_name") or "cosine"
        if similarity not in get_args(Similarity):
            raise ConfigError(
                f"{folder} compares vectors by {similarity}; cosine and dot are what we do. Set "
                "similarity_fn_name in config_sentence_transformers.json to one of these."
            )
        assert isinstance(modules, list)
        assert isinstance(pooling, dict)
        by_role = prompts.get("prompts", {})
        if pooling.get("include_prompt", True) is not True:
            raise ConfigError(
                f"{folder / '1_Pooling/config.json'} leaves the tokens of prompts out of the "
                "pooling (include_prompt), which we do not. Set it to true to pool them too."
            )
        return cls(
            pool or _pool(pooling, folder),
            len(modules) > 2,
            transformer.get("max_seq_length"),
            by_role.get("query", ""),
            next((by_role[role] for role in _DOCUMENT_PROMPTS if role in by_role), ""),
            by_role.get(prompts.get("default_prompt_name") or "", ""),
            transformer.get("do_lower_case", False),
            cast(Similarity, similarity),
        )


def _pool(settings: Mapping[str, object], folder: Path) -> Pool:
    """The pooling that 1_Pooling/config.json describes."""
    modes = settings.get("pooling_mode")
    if modes is None:
        flags = {_FLAG.fullmatch(name): value for name, value in settings.items()}
        modes = [match[1] for match, value in flags.items() if match and value is True]
    mode = modes[0] if isinstance(modes, list) and len(modes) == 1 else modes
    if not isinstance(mode, str) or mode not in _MODES:
        raise ConfigError(
            f"{folder / '1_Pooling/config.json'} pools by {mode}; {', '.join(_MODES)} are what we "
            "do. Name one with --pool."
        )
    return _MODES[mode]


class SentenceEncoder:
    """A trained model that makes a vector of each text, on the best device available.

    Attributes:
        pooling: how.
        width: D, of the vectors.
        identity: digest of the weights.
        truncated: number of texts so far that were longer than the model reads.

    Args:
        checkpoint: see `trainer.training.weights.loading.load_weights`.
        given: replace those of the pooling.
        stored: replaces the pooling that goes with the weights.

    Raises:
        ConfigError: the model reads from left to right, and its first token is to be taken, or it
            is in a folder of sentence-transformers.
    """

    def __init__(
        self,
        checkpoint: str,
        given: Given = MappingProxyType({}),
        stored: Pooling | None = None,
    ) -> None:
        weights = load_weights(checkpoint)
        self.identity = weights.identity()
        if stored is None and weights.step is None and isinstance(weights.folder, Path):
            stored = Pooling.of(weights.folder, given.get("pool"))
        self.pooling = replace(stored or Pooling(), **given)
        self._encoder = encoder = TextEncoder(weights)
        self.width, self.device = encoder.width, encoder.device
        self.truncated = 0
        modules = Path(str(weights.folder)) / "modules.json"
        if weights.step is None and not encoder.sees_all and modules.is_file():
            # Which special tokens it puts around a text differs from model to model.
            raise ConfigError(
                f"{checkpoint} is a folder of sentence-transformers with a model that reads from "
                "left to right, and its special tokens would be others. Remove modules.json to "
                "embed with those of samestep, and name the pooling with --pool."
            )
        if self.pooling.pool == "first" and not encoder.sees_all:
            raise ConfigError(
                "--pool first needs a model whose first token attends to the whole text, and "
                f"{checkpoint} reads from left to right. Use --pool last or mean."
            )
        if self.pooling.longest is not None:
            special = encoder.first + encoder.last
            if self.pooling.longest <= special:
                raise ConfigError(
                    f"texts of {self.pooling.longest} tokens have no space beside the {special} "
                    "special ones. Set --max-length higher."
                )
            encoder.longest = min(encoder.longest, self.pooling.longest - special)

    @torch.no_grad()
    def __call__(self, texts: Sequence[str], batch_tokens: int = 8192) -> Tensor:
        """Makes the vectors of texts: fp32 [N, D] on the CPU.

        Args:
            texts: with their prompts.
            batch_tokens: positions computed at a time, padding included.
        """
        encoder, layer = self._encoder, self._encoder.layers
        if self.pooling.lower:
            texts = [text.lower() for text in texts]
        encoded = encoder.tokenizer.encode_batch([text.strip() for text in texts])
        self.truncated += sum(len(tokens) > encoder.longest for tokens in encoded)
        tokens = [encoder.prepare(each) for each in encoded]
        lengths = np.array([len(each) for each in tokens], dtype=np.int64)
        vectors = torch.empty(len(texts), self.width)
        for numbers in batches(lengths, batch_tokens):
            real, states = encoder([tokens[number] for number in numbers], {layer})
            pooled = pool(states[layer], real, self.pooling.pool)
            if self.pooling.normalize:
                pooled = F.normalize(pooled)
            vectors[torch.from_numpy(numbers)] = pooled.cpu()
        return vectors

    def for_role(
        self, role: Literal["query", "document", "default"], texts: Sequence[str]
    ) -> list[str]:
        """Texts with the prompt of a role before each."""
        prompt: str = getattr(self.pooling, role)
        return [prompt + text for text in texts]


def pool(hidden: Tensor, real: Tensor, how: Pool) -> Tensor:
    """[B, S, D] -> [B, D]; real: bool [B, S], False for the padding after each text."""
    if how == "first":
        return hidden[:, 0]
    lengths = real.sum(1)
    if how == "last":
        return hidden[torch.arange(len(hidden), device=hidden.device), lengths - 1]
    if how == "max":
        return hidden.masked_fill(~real[..., None], -torch.inf).amax(1)
    shares = real.to(hidden.dtype)
    if how == "weighted":
        shares = shares * torch.arange(1, real.shape[1] + 1, device=real.device)
    total = shares.sum(1, keepdim=True)
    return (hidden * shares[..., None]).sum(1) / total
