"""The unfinished vectors of a command that was stopped: `OUTPUT.partial`."""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from samestep.errors import ConfigError, DataError, StorageError, fix_of
from samestep.hashing import U64, uniform
from samestep.storage import atomic_write, flock, make_folder, write_text
from samestep.stored_json import Count, JsonError, damage_of, parse_json, read_json
from trainer.vectors.settings import Settings

_SAVE_EVERY = 60.0  # seconds


@contextmanager
def unfinished(output: Path, made_of: Mapping[str, object]) -> Iterator[Path]:
    """Opens the folder of unfinished vectors; the work of an earlier command there is kept.

    Args:
        output: a new folder. It appears when the block has made `result` in the folder.
        made_of: settings and inputs that the vectors depend on.

    Raises:
        ConfigError: the output exists, another process makes it, or it was begun with something
            else.
    """
    if output.exists():
        raise ConfigError(f"--output {output} is there already; remove it, or name another folder")
    folder = output.with_name(f"{output.name}.partial")
    begun = folder / "settings.json"
    try:
        make_folder(folder)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise ConfigError(
            f"cannot write in {folder}: {error.strerror}; "
            f"{fix_of(error, 'make it writable')}, or name another --output"
        ) from error
    with lock:
        flock.lock_or_reject(
            lock, f"another process makes {output}; wait for it, or name another --output"
        )
        with damage_of(begun, ConfigError, f"Remove {folder} to start over."):
            before = read_json(begun, dict[str, object]) if begun.exists() else dict(made_of)
        if changed := [name for name, value in made_of.items() if before.get(name) != value]:
            raise ConfigError(
                f"{folder} was begun with another {' and '.join(changed)}; use the same again, or "
                "remove the folder to start over"
            )
        write_text(begun, json.dumps(dict(made_of)))
        try:
            yield folder
        except (ConfigError, DataError) as error:
            # Another setting is needed, so nothing that is there will be continued.
            if not isinstance(error, StorageError):
                shutil.rmtree(folder)
            raise
        (folder / "result").rename(output)
        shutil.rmtree(folder)


def check_finite(loss: float, settings: Settings) -> None:
    """Checks the loss of a block.

    Raises:
        ConfigError: it is infinite or not a number.
    """
    if not math.isfinite(loss):
        raise ConfigError(
            f"the vectors grow without bound: the loss is {loss} with --rate {settings.rate} and "
            f"--batch-size {settings.batch_size}. Lower one of them."
        )


def random_table(keys: U64, words: int, dimensions: int) -> Tensor:
    """Initial vectors, uniform in (-0.5, 0.5) / D, from a key for each element: fp32 [V, ...]."""
    values = ((uniform(keys) - 0.5) / dimensions).astype(np.float32)
    return torch.from_numpy(values.reshape(words, -1))


class State:
    """The arrays of a training, in a file from which the same command continues.

    Attributes:
        done: number of blocks that the arrays have been trained on.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._saved = path, time.monotonic()
        self._arrays: dict[str, Tensor] = {}
        self.done = 0
        try:
            with suppress(FileNotFoundError), safe_open(path, framework="pt") as stored:
                self.done = parse_json((stored.metadata() or {}).get("done", ""), Count)
                names = list(stored.keys())
                self._arrays = {name: stored.get_tensor(name).clone() for name in names}
        except (SafetensorError, JsonError) as error:
            raise DataError(
                f"{path} is damaged: {error}. Remove {path.parent} to start over."
            ) from error

    def seen(self, items: int, block: int) -> int:
        """Number of words or pairs in the blocks that are done.

        Args:
            items: in an epoch.
            block: in a block; the last one of an epoch may have fewer.
        """
        epochs, blocks = divmod(self.done, -(-items // block))
        return epochs * items + blocks * block

    def load(self, initial: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the stored arrays, or the initial ones."""
        return self._arrays or initial()

    def save(self, done: int, arrays: dict[str, Tensor]) -> None:
        """Stores the arrays, if the last time is a minute ago."""
        self.done = done
        # Blocks take seconds, and the arrays may have gigabytes.
        if time.monotonic() - self._saved < _SAVE_EVERY:
            return
        with atomic_write(self._path) as file:
            file.write(save(arrays, {"done": str(done)}))
        self._saved = time.monotonic()
