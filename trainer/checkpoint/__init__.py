"""Checkpoints: sharded, asynchronous, crash-consistent, and the same whatever wrote them.

A step's folder holds one safetensors file per rank (`layout`), `meta.json`, `checksums.json` and,
written last, `COMMITTED` (`integrity`). `manager.Checkpointer` is what a training loop uses. Every
operation on disk is in `files`.
"""

from trainer.checkpoint.integrity import read_meta
from trainer.checkpoint.manager import Checkpointer, Config

__all__ = ["Checkpointer", "Config", "read_meta"]
