"""Folders in Hugging Face format.

Config.json, safetensors weights (whole or in parts with an index), a tokenizer.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer.checkpoint import files
from trainer.config import Tree
from trainer.errors import CheckpointError
from trainer.storage.hub import TOKENIZER_FILES

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_CARD = "README.md"


class _TensorFile(Protocol):
    """A file that `safe_open` has opened."""

    def keys(self) -> list[str]: ...
    def get_tensor(self, name: str) -> Tensor: ...


class LazyTensors(Mapping[str, Tensor]):
    """Tensors of safetensors files by name, each read from the disk when it is asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._files: dict[str, _TensorFile] = {}
        for path in paths:
            try:
                file: _TensorFile = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"cannot read {path}: {error}; copy or download it again"
                ) from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def identity(folder: Path) -> str:
    """A digest of a model's settings and weights, or an adapter's."""
    names = [
        _ADAPTER_CONFIG if is_adapter(folder) else _CONFIG,
        *sorted(path.name for path in folder.glob("*.safetensors")),
    ]
    return hashlib.sha256(
        "".join(files.digest(folder / name).sha256 for name in names).encode()
    ).hexdigest()


def load_folder(folder: Path) -> tuple[Tree, LazyTensors]:
    """Opens a model's folder.

    Returns:
        The content of config.json, and the tensors, which are read when they are asked for.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    config = _read_json(folder / _CONFIG)
    if (folder / _WEIGHTS).exists():
        return config, LazyTensors([folder / _WEIGHTS])
    if (folder / _INDEX).exists():
        parts = _read_json(folder / _INDEX).get("weight_map", {})
        tensors = LazyTensors([folder / part for part in sorted(set(parts.values()))])
        absent = sorted(set(parts) - set(tensors))
        if absent:
            raise CheckpointError(
                f"{folder / _INDEX} lists {absent[0]}, which {folder / parts[absent[0]]} does not "
                "hold; download the folder again"
            )
        return config, tensors
    if (folder / "pytorch_model.bin").exists():
        raise CheckpointError(
            f"{folder} has its weights in pytorch_model.bin, a pickle, which could run any code "
            "when read; convert it "
            "where you trust it: "
            f"AutoModelForMaskedLM.from_pretrained({str(folder)!r}).save_pretrained('converted')"
        )
    raise CheckpointError(
        f"{folder} has neither {_WEIGHTS} nor {_INDEX}; name a folder that save_pretrained wrote"
    )


def is_adapter(folder: Path) -> bool:
    """Whether a folder is of the `peft` library: what was added to a model, without the model."""
    return (folder / _ADAPTER_CONFIG).is_file()


def load_adapter(folder: Path) -> tuple[Tree, LazyTensors]:
    """Opens a folder of the `peft` library, as `load_folder` does one of a model.

    Raises:
        CheckpointError: naming the file that is missing or damaged.
    """
    config = _read_json(folder / _ADAPTER_CONFIG)
    if not (folder / _ADAPTER_WEIGHTS).exists():
        raise CheckpointError(
            f"{folder} has no {_ADAPTER_WEIGHTS}; copy or download it whole, or save it as "
            "safetensors"
        )
    return config, LazyTensors([folder / _ADAPTER_WEIGHTS])


def save_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    tokenizer_folder: Path | None = None,
    card: str | None = None,
    adapter: bool = False,
) -> None:
    """Writes a folder that `transformers`, or `peft`, loads.

    It appears under its name once it is whole.

    Args:
        folder: must not exist yet, or be empty.
        config: the content of config.json.
        tensors: CPU tensors that share no memory.
        tokenizer_folder: where the tokenizer's files are copied from.
        card: the content of README.md.
        adapter: whether it is of the `peft` library.

    Raises:
        CheckpointError: the folder is taken or cannot be written, or there is no tokenizer in
            `tokenizer_folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} already exists; remove it, or export to another folder")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir(parents=True)
        settings, weights = (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS) if adapter else (_CONFIG, _WEIGHTS)
        (temporary / settings).write_text(
            json.dumps(dict(config), indent=2) + "\n", encoding="utf-8"
        )
        save_file(dict(tensors), temporary / weights, metadata={"format": "pt"})
        if tokenizer_folder is not None:
            _copy_tokenizer(tokenizer_folder, temporary)
        if card is not None:
            (temporary / _CARD).write_text(card, encoding="utf-8")
        for file in temporary.iterdir():
            with file.open("rb") as content:
                os.fsync(content.fileno())
        temporary.replace(folder)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"cannot write {folder}: {error}; free some space, check the permissions of "
            f"{folder.parent}, or name another folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _copy_tokenizer(source: Path, target: Path) -> None:
    files = [source / name for name in TOKENIZER_FILES if (source / name).exists()]
    if not files:
        raise CheckpointError(
            f"{source} holds no tokenizer; name a folder with one of: {', '.join(TOKENIZER_FILES)}"
        )
    for file in files:
        shutil.copyfile(file, target / file.name)


def _read_json(path: Path) -> Tree:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"cannot read {path}: {error}; name a folder that save_pretrained wrote, or download "
            "it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
