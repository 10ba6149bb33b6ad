"""Checkpoints: sharded, asynchronous, crash-consistent, and independent of strategy and world size.

The folder of a step holds a safetensors file per rank, `meta.json`, `checksums.json` and, written
last, `COMMITTED`. The modules, from the training loop down to the bytes:

    manager      `Checkpointer`: saves in the background, restores, removes old steps
    writer       what one rank writes in a save, and in which order
    integrity    a step's folder: committed or not, its checksums, its damage
    removal      which folders are removed, and when
    meta         the description of a step, `meta.json`, checked
    layout       which bytes of which tensor lie in which file
    collective   an error on one rank becomes an error on all
    files        every file operation, on a file system or in an object store
    lock         one writer at a time in a folder
    lease        the number of a writer, which makes late writes of former ones harmless
    history      which checkpoints count, when several writers followed each other

Other formats: `deepspeed`, `huggingface`. `deferred` converts a model between formats tensor by
tensor.
"""

from trainer.checkpoint.manager import Checkpointer, Config
from trainer.checkpoint.meta import read_meta

__all__ = ["Checkpointer", "Config", "read_meta"]
