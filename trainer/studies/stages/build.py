"""Trains a tokenizer, if the recipe names none that exists, and builds a dataset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from data_pipeline.format.manifest import Manifest
from samestep.config import Tree, read_tree
from samestep.config.tree import merge
from samestep.storage import write_text
from trainer.studies.inputs import stamps_of, stamps_of_folders
from trainer.studies.stages import StageConfig


@dataclass(frozen=True, kw_only=True)
class Config(StageConfig):
    """A dataset.

    Attributes:
        recipe: file of `samestep data build`.
        settings: that replace the file's. Without `tokenizer.path`, a tokenizer is trained.
    """

    recipe: str
    settings: Tree = field(default_factory=dict)

    random = False
    product = "dataset"

    @property
    def _tokenizer(self) -> str | None:
        """One that exists already, or is made by another stage."""
        found: str | None = (self.settings.get("tokenizer") or {}).get("path")
        return found

    def resolved(self) -> Tree:
        tree = merge(read_tree(self.recipe), self.settings)
        tree.pop("output", None)  # chosen by the study, as the path of a tokenizer to train
        if self._tokenizer is None and "tokenizer" in tree:
            tree["tokenizer"].pop("path", None)
        return tree

    def inputs(self, resolved: Tree) -> Sequence[object]:
        return stamps_of(resolved) + stamps_of_folders(self._tokenizer)

    def commands(self, folder: Path, seed: int, settings: Tree) -> Sequence[Sequence[str]]:
        own = self._tokenizer is not None
        tokenizer = {} if own else {"path": str(folder / "tokenizer")}
        tree = merge(settings, {"tokenizer": tokenizer, "output": str(folder / self.product)})
        file = folder / "recipe.yaml"
        write_text(file, yaml.safe_dump(tree, sort_keys=False))
        build = ["data", "build", str(file)]
        # Its last file is there if the job was stopped after training it.
        if own or (folder / "tokenizer" / "tokenizer_config.json").exists():
            return [build]
        return [["data", "tokenizer", str(file), "--force"], build]

    def scores(self, folder: Path) -> Mapping[str, float]:
        shards = Manifest.load(folder / self.product).shards
        return {
            "documents": float(sum(shard.documents for shard in shards)),
            "tokens": float(sum(shard.tokens for shard in shards)),
        }
