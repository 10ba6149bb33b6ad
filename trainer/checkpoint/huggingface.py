"""Folders in Hugging Face format: config.json, safetensors weights, and a tokenizer."""

from __future__ import annotations

import hashlib
import json
import shutil
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from samestep.config import Tree
from samestep.errors import CheckpointError, fix_of
from samestep.examples import TOKENIZER_FILES
from samestep.untrusted import is_plain, read_regular, regular
from trainer.checkpoint import files

_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_CARD = "README.md"
_PICKLE = "pytorch_model.bin"
_INDEX = ".index.json"
_WRAPPERS = ("_orig_mod.", "module.", "model.")


def _load_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """Memory-maps the tensors of weight files; elements are read on access."""
    tensors: dict[str, Tensor] = {}
    for path in paths:
        try:
            read = _read_pickle if path.suffix == ".bin" else _read_safetensors
            tensors |= read(path)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                f"cannot read {path}: {error}. Copy or download it again"
            ) from error
    return tensors


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    tensors = load_file(regular(path))
    # `save_model` stores a tied tensor once, and its other names in the header.
    with safe_open(regular(path), "pt") as file:
        for alias, name in (file.metadata() or {}).items():
            if name in tensors:
                tensors.setdefault(alias, tensors[name])
    return tensors


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """Reads tensors and nothing else: `weights_only` creates no object that could run code."""
    try:
        # Files older than torch 1.6 are no archives, which alone can be memory-mapped.
        is_archive = zipfile.is_zipfile(regular(path))
        if is_archive:
            with zipfile.ZipFile(regular(path)) as archive:
                if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                    raise ValueError("compressed bytes would be read as numbers")
        content = torch.load(regular(path), "cpu", weights_only=True, mmap=is_archive)
    except (OSError, MemoryError):
        raise
    except Exception as error:  # a damaged pickle may raise any
        raise CheckpointError(
            f"{path} cannot be read as tensors alone, and may be damaged or hold other objects "
            "that would run code. Copy it again, or save the model as safetensors"
        ) from error
    if not isinstance(content, dict) or not all(map(_is_plain_tensor, content.values())):
        raise CheckpointError(
            f"{path} must hold tensors by name, and nothing else. Save model.state_dict() there"
        )
    return {str(name): tensor.detach() for name, tensor in content.items()}


def _is_plain_tensor(value: object) -> bool:
    if not isinstance(value, Tensor) or type(value) not in (Tensor, nn.Parameter):
        return False
    # Without numbers of its own, some bytes could stand for any number of elements.
    if value.layout != torch.strided or value.is_meta:
        return False
    numbers = value.numel() * value.element_size()
    is_whole = value.untyped_storage().nbytes() >= numbers
    return is_whole and not (value.is_quantized or value.is_complex())


def _unwrapped(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Removes the prefixes that torch.compile and DistributedDataParallel put before all names."""
    # Only a prefix of all names is a wrapper's.
    for wrapper in _WRAPPERS:
        if tensors and all(name.startswith(wrapper) for name in tensors):
            inner = {name.removeprefix(wrapper): each for name, each in tensors.items()}
            return _unwrapped(inner)  # a compiled model may be wrapped again
    return tensors


def first_not_finite(folder: Path) -> str | None:
    """Names the first tensor with NaN or infinity, and its file; None if there is none."""
    for path in _weight_files(folder):
        for name, tensor in _load_tensors([path]).items():
            if tensor.is_floating_point() and not tensor.float().isfinite().all():
                return f"{name} in {path}"
    return None


def _weight_files(folder: Path) -> list[Path]:
    """The files that `load_folder` reads, or an adapter's."""
    if is_adapter(folder):
        return [folder / _ADAPTER_WEIGHTS]
    file = _find_weights(folder)
    if file is None or not _is_index(file):
        return [] if file is None else [file]
    return [folder / name for name in sorted(set(_shards(file).values()))]


def _find_weights(folder: Path) -> Path | None:
    """The file with a model's weights, or the index of several; None if there is neither."""
    # As transformers looks for them: one file first, then an index; pickles last.
    names = (each for file in (_WEIGHTS, _PICKLE) for each in (file, f"{file}{_INDEX}"))
    return next((folder / name for name in names if (folder / name).exists()), None)


def _is_index(file: Path) -> bool:
    return file.name.endswith(_INDEX)


def identity(folder: Path) -> str:
    """Returns a digest of a model's or an adapter's settings and weights."""
    config = _ADAPTER_CONFIG if is_adapter(folder) else _CONFIG
    names = [config, *(path.name for path in _weight_files(folder))]
    digests = "".join(files.digest(folder / name).sha256 for name in names)
    return hashlib.sha256(digests.encode()).hexdigest()


def load_folder(folder: Path) -> tuple[Tree, dict[str, Tensor]]:
    """Opens a model's folder.

    Returns:
        The content of config.json, and the tensors, which are read on access.

    Raises:
        CheckpointError: with the file that is missing or damaged.
    """
    config = _read_json(folder / _CONFIG)
    file = _find_weights(folder)
    if file is None:
        raise CheckpointError(
            f"{folder} has neither {_WEIGHTS} nor {_WEIGHTS}{_INDEX}. Name a folder that "
            "save_pretrained wrote"
        )
    tensors = _load_shards(folder, file) if _is_index(file) else _load_tensors([file])
    return config, _unwrapped(tensors)


def _load_shards(folder: Path, index: Path) -> dict[str, Tensor]:
    shards = _shards(index)
    # A set, as many tensors are in one file.
    tensors = _load_tensors(folder / shard for shard in sorted(set(shards.values())))
    if absent := sorted(set(shards) - set(tensors)):
        raise CheckpointError(
            f"{index} lists {absent[0]}, which {folder / shards[absent[0]]} does not hold. "
            "Download the folder again"
        )
    return tensors


def _shards(index: Path) -> dict[str, str]:
    """The file of each tensor.

    Raises:
        CheckpointError: a file is of another format than the index, or outside of the folder: the
            index may come from a stranger.
    """
    shards: dict[str, str] = _read_json(index).get("weight_map", {})
    names = list(shards.values()) if isinstance(shards, dict) else [None]
    ending = Path(index.name.removesuffix(_INDEX)).suffix
    for name in names:
        if not is_plain(name):
            raise CheckpointError(
                f"{index} names the file {name!r}, which is not in its folder. Download the folder "
                "from a source that you trust"
            )
        if Path(name).suffix != ending:
            raise CheckpointError(
                f"{index} names the file {name!r}, which is no {ending} file. Save the model as "
                "safetensors, or correct the names in the index"
            )
    return shards


@contextmanager
def wrong_settings_explained(folder: files.Location) -> Iterator[None]:
    """Turns errors from building a model of stored settings into an error of their file.

    Raises:
        CheckpointError: a value has another type, or values do not fit together.
    """
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise CheckpointError(
            f"{folder} has settings of a wrong type or size in its JSON files ({error}). Copy or "
            "download it again"
        ) from error
    except RuntimeError as error:  # of torch, for shapes that it cannot have
        raise CheckpointError(
            f"no model can be built of the settings in {folder} ({error}). Copy or download it "
            "again"
        ) from error


def is_adapter(folder: Path) -> bool:
    """Whether a folder is of the `peft` library: what was added to a model, without the model."""
    return (folder / _ADAPTER_CONFIG).is_file()


def load_adapter(folder: Path) -> tuple[Tree, dict[str, Tensor]]:
    """Opens a folder of the `peft` library, as `load_folder` opens a model's.

    Raises:
        CheckpointError: with the file that is missing or damaged.
    """
    config = _read_json(folder / _ADAPTER_CONFIG)
    if not (folder / _ADAPTER_WEIGHTS).exists():
        raise CheckpointError(
            f"{folder} has no {_ADAPTER_WEIGHTS}. Copy or download all its files, or save it as "
            "safetensors"
        )
    return config, _unwrapped(_load_tensors([folder / _ADAPTER_WEIGHTS]))


def save_folder(
    folder: Path,
    config: Mapping[str, object],
    tensors: Mapping[str, Tensor],
    tokenizer_folder: Path | None = None,
    card: str | None = None,
    adapter: bool = False,
    more: Mapping[str, object] | None = None,
) -> None:
    """Writes a folder that `transformers` or `peft` loads; it appears once it is complete.

    Args:
        folder: must not exist yet, or be empty.
        config: content of config.json.
        tensors: on the CPU; must not share memory.
        tokenizer_folder: the tokenizer's files are copied from here.
        card: content of README.md.
        adapter: whether it is a folder of the `peft` library.
        more: content of further JSON files, by their names below the folder.

    Raises:
        CheckpointError: the folder is not empty or cannot be written, or there is no tokenizer in
            `tokenizer_folder`.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} already exists. Remove it, or export to another folder")
    from samestep.storage.new_folder import new_folder

    config_name, weights = (_ADAPTER_CONFIG, _ADAPTER_WEIGHTS) if adapter else (_CONFIG, _WEIGHTS)
    try:
        with new_folder(folder) as temporary:
            text = json.dumps(dict(config), indent=2) + "\n"
            (temporary / config_name).write_text(text, encoding="utf-8")
            # transformers asks for this key: which framework wrote the file.
            save_file(dict(tensors), temporary / weights, metadata={"format": "pt"})
            if tokenizer_folder is not None:
                _copy_tokenizer(tokenizer_folder, temporary)
            if card is not None:
                (temporary / _CARD).write_text(card, encoding="utf-8")
            for name, content in (more or {}).items():
                (temporary / name).parent.mkdir(exist_ok=True)
                text = json.dumps(content, indent=2) + "\n"
                (temporary / name).write_text(text, encoding="utf-8")
    except (OSError, SafetensorError) as error:
        # The library of safetensors has an exception of its own for a full disk.
        fix = fix_of(error) if isinstance(error, OSError) else "free some space"
        fix = fix or f"check the permissions of {folder.parent}"
        raise CheckpointError(
            f"cannot write {folder}: {error}; {fix}, or name another folder"
        ) from error


def _copy_tokenizer(source: Path, target: Path) -> None:
    # By name, as the folder may be a run's and hold other files.
    found = [name for name in TOKENIZER_FILES if (source / name).exists()]
    if not found:
        names = ", ".join(TOKENIZER_FILES)
        raise CheckpointError(f"{source} holds no tokenizer. Name a folder with one of: {names}")
    for name in found:
        shutil.copyfile(source / name, target / name)


def _read_json(path: Path) -> Tree:
    try:
        content = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError) as error:  # deeply nested brackets
        raise CheckpointError(
            f"cannot read {path}: {error}. Name a folder that save_pretrained wrote, or download "
            "it again"
        ) from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, not a {type(content).__name__}")
    return content
