"""How a folder of `SparseEncoder` of sentence-transformers says that it computes SPLADE."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from samestep.errors import ConfigError

MODULES = ("Transformer", "SpladePooling")
POOLING = "1_SpladePooling/config.json"
EXPORTED = tuple(
    f"sentence_transformers.sparse_encoder.models.{name}"
    for name in ("MLMTransformer", "SpladePooling")
)
"""Classes that versions from 5.0 on load; MLMTransformer is a Transformer for masked tokens."""
COMPUTED: Mapping[str, object] = {"pooling_strategy": "max", "activation_function": "relu"}
"""The content of `POOLING` that samestep computes."""
_LEGACY = "MLMTransformer"
_TASK = "fill-mask"


def is_sparse(kinds: Sequence[str]) -> bool:
    """Whether modules of these classes compute SPLADE."""
    names = [kind.rpartition(".")[2] for kind in kinds]
    return names in ([*MODULES], [_LEGACY, MODULES[1]])


def check(
    file: object,
    kinds: Sequence[str],
    transformer: Mapping[str, object],
    pooling: Mapping[str, object],
    settings: Mapping[str, object],
) -> None:
    """Rejects a folder that `pooling.splade` does not compute.

    Args:
        file: modules.json, for the message.
        kinds: classes of its modules.
        transformer: content of sentence_bert_config.json.
        pooling: content of the config.json of SpladePooling.
        settings: content of config_sentence_transformers.json.

    Raises:
        ConfigError: names the setting.
    """
    task = _TASK if kinds[0].endswith(_LEGACY) else None
    found = {
        "transformer_task": transformer.get("transformer_task", task),
        **{name: pooling.get(name, value) for name, value in COMPUTED.items()},
        "max_active_dims": settings.get("max_active_dims"),
    }
    for name, value in {"transformer_task": _TASK, **COMPUTED, "max_active_dims": None}.items():
        if found[name] != value:
            raise ConfigError(
                f"{file} is of a SparseEncoder with {name} {found[name]!r}, and samestep computes "
                f"{value!r} only. Use another model"
            )
