"""Families in Hugging Face's format: the `config.json` and the names of tensors, both ways.

A family's `Config.codec` names the module here, or in another package, whose `Codec` knows these.
Only what reads or writes such files imports one.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

from torch import Tensor

from samestep.errors import ConfigError
from trainer.models import ModelConfig

ConfigJson: TypeAlias = dict[str, Any]
"""The content of a `config.json` of transformers."""

Names: TypeAlias = Mapping[str, tuple[str, ...]]
"""Parameter name -> names of the checkpoint's tensors that are concatenated in its rows."""

C = TypeVar("C", bound=ModelConfig)


class Codec(ABC, Generic[C]):
    """Converts a model of one family to and from Hugging Face's format.

    Args:
        config: the model.

    Attributes:
        model_type: the family's name in `config.json`.
        prefix_in_peft: whether Hugging Face's `peft` can insert a prefix: transformers' models of
            this family take one as a key-value cache.
        prompt_in_peft: whether its heads for tasks take embeddings in place of tokens, as a prompt
            of `peft` needs.
        targets_not_in_peft: targets of LoRA that `peft` lacks, since transformers' models of this
            family have no linear layer there.
        code: repository on the Hub with the classes of an exported model that transformers lacks;
            it runs them only with `trust_remote_code=True`.
        packages: that the code imports.
    """

    model_type: ClassVar[str]
    prefix_in_peft: ClassVar[bool] = False
    prompt_in_peft: ClassVar[bool] = True
    targets_not_in_peft: ClassVar[frozenset[str]] = frozenset()
    code: ClassVar[str] = ""
    packages: ClassVar[tuple[str, ...]] = ()

    def __init__(self, config: C) -> None:
        self.config = config

    @classmethod
    @abstractmethod
    def from_huggingface(
        cls, family: type[C], config: ConfigJson, tensors: Iterable[str] = ()
    ) -> C:
        """Reads the content of a `config.json`.

        Args:
            family: the model's class of configurations.
            config: the content.
            tensors: names of the checkpoint's tensors, to detect heads: many checkpoints have a
                head that their `architectures` do not mention.

        Raises:
            ConfigError: it describes another kind of model, or lacks a key.
        """

    @abstractmethod
    def to_huggingface(self) -> ConfigJson:
        """The content of a `config.json` from which transformers' `Auto` class builds this model.

        Raises:
            ConfigError: transformers has no such model.
        """

    @abstractmethod
    def tensor_names(self) -> dict[str, tuple[str, ...]]:
        """Parameter name -> names of transformers' tensors that are concatenated in its rows."""

    @abstractmethod
    def import_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts the tensors of a checkpoint to parameters, in their precision.

        Raises:
            CheckpointError: tensors are missing, unexpected or have another shape.
        """

    @abstractmethod
    def export_tensors(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts parameters to the tensors of a checkpoint.

        Raises:
            CheckpointError: parameters are missing, unexpected or have another shape.
        """

    def import_spare(self, tensors: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """Trained parts that this model lacks and another head has: head -> its parameters."""
        return {}

    def export_spare(self, spare: Mapping[str, Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Converts the result of `import_spare` to tensors that belong beside this model's."""
        return {}

    def import_rows(self, name: str, rows: Tensor) -> Tensor:
        """Puts the rows of transformers' matrix `name`, or of LoRA's B for it, in our order."""
        return rows

    def export_rows(self, name: str, rows: Tensor) -> Tensor:
        """The inverse of `import_rows`."""
        return rows

    def export_parts(self) -> Mapping[str, tuple[ModelConfig, str]]:
        """Models inside of this one that can be exported: name -> configuration and prefix."""
        return {}


def codec_of(config: ModelConfig) -> Codec[Any]:
    """Returns the codec of a model.

    Raises:
        ConfigError: its family has none.
    """
    return _codec(type(config))(config)


def read_config(family: type[C], config: ConfigJson, tensors: Iterable[str] = ()) -> C:
    """Reads the content of a `config.json`; see `Codec.from_huggingface`.

    Raises:
        ConfigError: it describes another kind of model, or lacks a key; or the family has no codec.
    """
    found: C = _codec(family).from_huggingface(family, config, tensors)
    return found


def _codec(family: type[ModelConfig]) -> type[Codec[Any]]:
    if not family.codec:
        raise ConfigError(
            f"{family.__module__} has no Hugging Face format. Use the checkpoint with samestep."
        )
    # By name, so that a run without such files imports no codec.
    found: type[Codec[Any]] = importlib.import_module(family.codec).Codec
    return found
