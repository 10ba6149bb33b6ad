"""Models and tokenizers of the Hugging Face Hub: `hf://NAME[@REVISION]` stands for a folder, downloaded on first use.

What has been downloaded is used from then on, without asking the Hub whether there is something newer. Weights are
taken as safetensors only: other formats are pickles, which can run any code when they are read.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainer.errors import ConfigError, MissingExtra, StorageError

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
    "spiece.model",
)
_MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    *TOKENIZER_FILES,
)
_ADDRESS = re.compile(
    r"hf://(?!datasets/|spaces/)(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^@]+))?"
)


def is_hub_path(path: str) -> bool:
    """Whether `path` is the address of a repository rather than a folder."""
    return path.startswith("hf://")


def name_and_revision(path: str) -> tuple[str, str]:
    """The parts of hf://NAME[@REVISION]; without a revision, it is empty."""
    name, _, revision = path.removeprefix("hf://").partition("@")
    return name, revision


def model_folder(path: str, to: str | None = None) -> Path:
    """The folder of a model: configuration, safetensors weights and tokenizer; see `_folder`."""
    return _folder(
        path,
        _MODEL_FILES,
        (("config.json",), ("model.safetensors", "model.safetensors.index.json")),
        to,
    )


def tokenizer_folder(path: str, to: str | None = None) -> Path:
    """The folder of a tokenizer; see `_folder`."""
    return _folder(
        path, TOKENIZER_FILES, (("tokenizer.json", "vocab.txt", "vocab.json", "spiece.model"),), to
    )


def _folder(
    path: str, files: tuple[str, ...], needed: tuple[tuple[str, ...], ...], to: str | None
) -> Path:
    """Finds a repository's files in the cache, or downloads them: once a node, however many processes ask.

    Args:
        path: hf://NAME or hf://NAME@REVISION.
        files: patterns of what is downloaded.
        needed: names; of each group, one must be there.
        to: a folder that gets the files instead of the cache.

    Raises:
        ConfigError: the path is malformed.
        MissingExtra: huggingface-hub is not installed.
        StorageError: the repository is unknown, not ours to read, out of reach, or holds no such files.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import WeakFileLock, validate_repo_id  # type: ignore[attr-defined]
    except ImportError:
        raise MissingExtra("huggingface-hub", "hf", path) from None
    address = _ADDRESS.fullmatch(path)
    try:
        validate_repo_id(address["name"] if address else "")
    except errors.HFValidationError:
        address = None
    if address is None:
        raise ConfigError(
            f"{path!r} is not the address of a model: write hf://NAME or hf://NAME@REVISION"
        )

    def get(local_files_only: bool) -> Path | None:
        folder = Path(
            snapshot_download(
                address["name"],
                revision=address["revision"],
                allow_patterns=list(files),
                local_dir=to,
                local_files_only=local_files_only,
            )
        )
        return (
            folder
            if all(any((folder / name).is_file() for name in group) for group in needed)
            else None
        )

    def cached() -> Path | None:
        try:
            return None if to else get(local_files_only=True)
        except errors.LocalEntryNotFoundError:
            return None

    found = cached()
    if found:
        return found
    try:
        lock = Path(
            constants.HF_HUB_CACHE, ".locks", f"samestep-{address['name'].replace('/', '--')}.lock"
        )
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            found = cached() or get(local_files_only=False)
    except (
        Exception
    ) as error:  # what breaks a download has another class in each version of the Hub's client
        raise StorageError(f"{path} {_explained(error, path)}") from error
    if found is None:
        raise StorageError(
            f"{path} has no {' and no '.join(' or '.join(group) for group in needed)}; choose a revision that has "
            "(hf://NAME@REVISION), or convert it where you trust it, with save_pretrained, and name that folder"
        )
    return found


def _explained(error: Exception, path: str) -> str:
    """What went wrong and what to do about it."""
    from huggingface_hub import constants, errors

    reason = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
    match error:
        case errors.RevisionNotFoundError():
            return "names a revision that the Hub does not have; name a branch, a tag or a commit"
        case errors.RepositoryNotFoundError():
            return f"is unknown to the Hub, or private or gated ({reason}); correct it, or log in with `hf auth login`"
        case errors.LocalEntryNotFoundError():
            return (
                f"is not in the cache {constants.HF_HUB_CACHE} and the Hub cannot be reached ({reason}); run "
                f"`samestep fetch {path} --to DIR` on a machine with internet, copy DIR here and name it instead"
            )
    return f"cannot be downloaded: {reason}; run the same command again"
