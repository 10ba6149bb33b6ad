"""Models and tokenizers of the Hugging Face Hub: `hf://NAME[@REVISION]` is downloaded on first use.

After the first download the cached files are used, and the Hub is not asked for newer ones.
Weights are read from safetensors only: other formats are pickles, which can run any code.
"""

from __future__ import annotations

import re
from pathlib import Path

from samestep.errors import ConfigError, MissingExtra, StorageError
from samestep.examples import TOKENIZER_FILES

MODEL_FILES = (
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "model-*-of-*.safetensors",
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    *TOKENIZER_FILES,
    "README.md",
)
# At least one file of each group makes a model, or a tokenizer.
_MODEL_NEEDS = (("config.json",), ("model.safetensors", "model.safetensors.index.json"))
_TOKENIZER_NEEDS = (
    ("tokenizer.json", "vocab.txt", "vocab.json", *(n for n in TOKENIZER_FILES if ".model" in n)),
)
_ADDRESS = re.compile(
    r"hf://(?!datasets/|spaces/)(?P<name>[\w.-]+(?:/[\w.-]+)?)(?:@(?P<revision>[^@]+))?"
)


def name_and_revision(path: str) -> tuple[str, str]:
    """Splits hf://NAME[@REVISION]; the revision is empty if there is none."""
    name, _, revision = path.removeprefix("hf://").partition("@")
    return name, revision


def model_folder(path: str, to: str | None = None) -> Path:
    """Folder with a model's configuration, safetensors weights and tokenizer; see `_folder`."""
    return _folder(path, MODEL_FILES, _MODEL_NEEDS, to)


def tokenizer_folder(path: str, to: str | None = None) -> Path:
    """Folder with the files of a tokenizer; see `_folder`."""
    # config.json may be the only file that names the tokenizer's class.
    return _folder(path, (*TOKENIZER_FILES, "config.json"), _TOKENIZER_NEEDS, to)


def _folder(
    path: str, files: tuple[str, ...], needed: tuple[tuple[str, ...], ...], to: str | None
) -> Path:
    """Finds a repository's files in the cache, or downloads them once per node.

    Args:
        path: hf://NAME or hf://NAME@REVISION.
        files: patterns of the files to download.
        needed: groups of names; at least one of each group must exist.
        to: a folder that receives the files instead of the cache.

    Raises:
        ConfigError: the path is malformed.
        MissingExtra: huggingface-hub is not installed.
        StorageError: the repository is unknown, private, unreachable, or has no such files.
    """
    try:
        from huggingface_hub import constants, errors, snapshot_download
        from huggingface_hub.utils import (  # type: ignore[attr-defined]
            WeakFileLock,
            validate_repo_id,
        )
    except ImportError:
        raise MissingExtra("huggingface-hub", "hf", path) from None
    address = _ADDRESS.fullmatch(path)
    try:
        validate_repo_id(address["name"] if address else "")
    except errors.HFValidationError:
        address = None
    if address is None:
        raise ConfigError(f"{path!r} names no model. Write hf://NAME or hf://NAME@REVISION.")

    def get(local_files_only: bool) -> Path | None:
        """The folder, or None if it lacks a needed file, as after a download that was killed."""
        folder = Path(
            snapshot_download(
                address["name"],
                revision=address["revision"],
                allow_patterns=list(files),
                # There, "*" of "model-*" stands for "/../", too.
                ignore_patterns=["model-*/*", "*/*/*"],
                local_dir=to,
                local_files_only=local_files_only,
            )
        )
        complete = all(any((folder / name).is_file() for name in group) for group in needed)
        return folder if complete else None

    def cached() -> Path | None:
        try:
            return None if to else get(local_files_only=True)
        except errors.LocalEntryNotFoundError:
            return None

    if found := cached():
        return found
    try:
        lock_name = f"samestep-{address['name'].replace('/', '--')}.lock"
        lock = Path(constants.HF_HUB_CACHE, ".locks", lock_name)
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):
            # Another process may have downloaded it while this one waited for the lock.
            found = cached() or get(local_files_only=False)
    except Exception as error:  # the classes differ between versions of the Hub's client
        raise StorageError(f"{path} {_explained(error, path)}") from error
    if found is None:
        missing = " and no ".join(" or ".join(group) for group in needed)
        raise StorageError(
            f"{path} has no {missing}. Choose a revision that has (hf://NAME@REVISION), or, if you "
            "trust its files, convert them with save_pretrained and name that folder."
        )
    return found


def _explained(error: Exception, path: str) -> str:
    """Says what went wrong and what to do about it; the message continues after the path."""
    from huggingface_hub import constants, errors

    reason = str(error.__cause__ or error).strip().partition("\n")[0] or type(error).__name__
    match error:
        case errors.RevisionNotFoundError():
            return "names a revision that the Hub does not have. Use a branch, a tag or a commit."
        case errors.RepositoryNotFoundError():
            return (
                f"is unknown to the Hub, private or gated ({reason}). Correct the name, or log in "
                "with `hf auth login`."
            )
        case errors.LocalEntryNotFoundError():
            return (
                f"is not in the cache {constants.HF_HUB_CACHE} and the Hub cannot be reached "
                f"({reason}). Run `samestep fetch {path} --to DIR` on a machine with internet "
                "access, copy DIR here and name it instead."
            )
    return f"cannot be downloaded: {reason}. Run the same command again."
