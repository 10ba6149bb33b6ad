"""Strict configuration: frozen dataclasses, YAML files with `base:`, and `key=value` overrides.

    experiment = load(Experiment, "configs/debug/bert_mini.yaml", ["optimizer.lr=1e-3"])

Precedence: dataclass default < `base:` < file < override. A section whose field is annotated with
`Kinds("package")` is decoded by the module that its `kind` names: `kind: mlm` under
"trainer.objectives.kinds" is `trainer/objectives/kinds/mlm.py`, a dotted kind is a user's own
module. Each such module has a frozen dataclass `Config`. Nothing in this package imports torch.
"""

from collections.abc import Sequence
from typing import TypeVar

from samestep.config.decode import Kinds, decode, kind_name
from samestep.config.render import dump, to_tree
from samestep.config.tree import Tree, differences, read_tree

T = TypeVar("T")

__all__ = [
    "Kinds",
    "Tree",
    "decode",
    "differences",
    "dump",
    "kind_name",
    "load",
    "read_tree",
    "to_tree",
]


def load(schema: type[T], path: str, overrides: Sequence[str] = ()) -> T:
    """Reads a file, its bases and the overrides into `schema`.

    Raises:
        ConfigError: names the file or the key, the value and the nearest valid key.
    """
    return decode(schema, read_tree(path, overrides))
