"""Names of parameters and the order in which modules register them, for all families and options.

Checkpoints find tensors by name. Gradient buckets, ZeRO's partitions and the sum of a norm follow
the order. `python -m tests.unit.models.test_parameter_names` writes the file after a change that is
meant.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
from collections.abc import Iterator
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import torch

from samestep.errors import ConfigError
from trainer.models import families
from trainer.models.config import Head
from trainer.models.peft.kinds import adapters, lora, prefix, prompt

FILE = Path(__file__).with_name("parameter_names.json")
SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "layers": 2,
    "width": 16,
    "heads": 2,
    "kv_heads": 1,
    "head_width": 8,
    "ffn_width": 24,
    "max_positions": 24,
    "position_buckets": 8,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "nsp": {"nsp": True},
    "span_boundary": {"span_boundary": True},
    "teacher_width": {"teacher_width": 24},
    "also_causal": {"also_causal": True},
    "causal": {"causal": True},
    "scalar_mix": {"scalar_mix": True},
    "head_lstm": {"head_lstm": 1},
    "crf": {"crf": True},
    "lm_head": {"lm_head": True},
    "not tied": {"tied": False},
    "pre": {"norm": "pre"},
    "gated": {"activation": "geglu"},
    "pooling": {"causal": False, "pooling": "late"},
    "qkv_bias": {"qkv_bias": True},
    "qk_norm": {"qk_norm": True},
    "embedding_width": {"embedding_width": 8},
    "decoder_layers": {"decoder_layers": 3},
    "language_model": {"architecture": "language_model"},
    "prefix_lm": {"architecture": "prefix_lm"},
    "shared_encoder_decoder": {"architecture": "shared_encoder_decoder"},
    "lora": {"peft": lora.Config()},
    "adapters": {"peft": adapters.Config(4)},
    "prefix": {"peft": prefix.Config(3)},
    "prompt": {"peft": prompt.Config(3)},
}


def models() -> Iterator[tuple[str, list[str]]]:
    """Yields "family, head, option", and the parameters as "name [shape]", in order."""
    for module in pkgutil.iter_modules(families.__path__):
        config = import_module(f"{families.__name__}.{module.name}").Config
        known = {field.name for field in fields(config)}
        shape = {name: value for name, value in SHAPE.items() if name in known}
        for head in get_args(Head):
            for option, settings in OPTIONS.items():
                given = {"head": head, **settings}
                if head in ("classification", "multiple_choice", "tagging"):
                    given["labels"] = ("a", "b", "c")
                if not given.keys() <= known:
                    continue
                try:
                    with torch.device("meta"):
                        model = config(**shape, **given).build()
                except ConfigError:  # this family has no such head or option
                    continue
                yield (
                    ", ".join(filter(None, (module.name, head, option))),
                    [f"{name} {list(value.shape)}" for name, value in model.named_parameters()],
                )


def summary() -> dict[str, Any]:
    """The parameters of each family's language model; of all others, a digest."""
    return {
        name: parameters if name.endswith(", language_model") else _digest(parameters)
        for name, parameters in models()
    }


def _digest(parameters: list[str]) -> str:
    text = "\n".join(parameters).encode()
    return f"{len(parameters)} {hashlib.sha256(text).hexdigest()[:16]}"


def test_names_and_order_are_those_of_checkpoints() -> None:
    stored, now = json.loads(FILE.read_text(encoding="utf-8")), summary()
    assert now.keys() == stored.keys()
    assert {name for name in now if now[name] != stored[name]} == set()


if __name__ == "__main__":
    FILE.write_text(json.dumps(summary(), indent=1) + "\n", encoding="utf-8")
