"""Files that `sentence-transformers` needs in addition to a model of `transformers`."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

from samestep.errors import CheckpointError, ConfigError
from samestep.stored_json import damage_of, read_json
from samestep.untrusted import inside, is_plain
from trainer.models import ModelConfig
from trainer.models.codecs import sparse_encoders
from trainer.models.codecs.sentence_transformers import Pooling
from trainer.models.pooling import ROLES, Pool
from trainer.training.weights.loading import Weights

FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
    sparse_encoders.POOLING,
)
_MODULES = "sentence_transformers.models."
_KEPT = ["Transformer", "Pooling", "Normalize"]
_LIST, _TRANSFORMER, _CONFIG, _POOLING, _SPARSE_POOLING = FILES
_FLAGS: Mapping[str, Pool | None] = {
    "pooling_mode_cls_token": "first",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": None,
    "pooling_mode_weightedmean_tokens": "weighted",
    "pooling_mode_lasttoken": "last",
}
_ACTIVATIONS = ("sentence_transformers", "sbert_ce_default_activation_function")
"""Keys of `config.json`, since version 4 and before."""


def stored(folder: Path) -> Mapping[str, object] | None:
    """The content of `FILES` in a folder of `sentence-transformers`; None if it is no such folder.

    Raises:
        CheckpointError: a file is damaged or missing.
        ConfigError: it computes more than the pooling and the normalization of hidden states.
    """
    file = inside(folder, _LIST)
    if not file.is_file():
        return None
    with damage_of(file, CheckpointError, "Copy the folder again."):
        modules = read_json(file, list[dict[str, object]])
    kinds = [str(module.get("type")) for module in modules]
    names = [kind.rpartition(".")[2] for kind in kinds]
    paths = [module.get("path") for module in modules]
    is_sparse = sparse_encoders.is_sparse(kinds)
    pooling = _SPARSE_POOLING if is_sparse else _POOLING
    is_kept = (
        (is_sparse or names in (_KEPT[:2], _KEPT))
        and all(kind.startswith("sentence_transformers.") for kind in kinds)
        and paths[:2] == ["", pooling.partition("/")[0]]
        and all(map(is_plain, paths[2:]))
    )
    if not is_kept:
        raise ConfigError(
            f"{file} has the modules {', '.join(kinds)}, some of which an export would lose: it "
            "keeps Transformer, Pooling (in 1_Pooling) and Normalize of sentence-transformers, or "
            "SpladePooling (in 1_SpladePooling). Remove modules.json to export the encoder alone."
        )
    found: dict[str, object] = {_LIST: modules}
    for name in (_TRANSFORMER, _CONFIG, pooling):
        file = inside(folder, name)
        if file.is_file() or name == pooling:
            with damage_of(file, CheckpointError, "Copy the folder again."):
                found[name] = read_json(file, dict[str, object])
    return found


def files(config: ModelConfig, pooling: Pooling) -> Mapping[str, object]:
    """The content of `FILES` for an encoder that embeds texts."""
    is_sparse = pooling.pool == "splade"
    modules = [("", f"{_MODULES}Transformer"), ("1_Pooling", f"{_MODULES}Pooling")]
    if is_sparse:
        modules = list(zip(("", "1_SpladePooling"), sparse_encoders.EXPORTED, strict=True))
    if pooling.normalize:
        modules.append(("2_Normalize", f"{_MODULES}Normalize"))
    length = config.max_positions if pooling.longest is None else pooling.longest
    prompts = {role: getattr(pooling, role) for role in ROLES}
    prompts = {role: prompt for role, prompt in prompts.items() if prompt}
    contents: dict[str, object] = {
        _LIST: [
            {"idx": number, "name": str(number), "path": path, "type": kind}
            for number, (path, kind) in enumerate(modules)
        ],
        _TRANSFORMER: {
            "max_seq_length": sys.maxsize if length is None else length,
            "do_lower_case": False,
        },
        _CONFIG: {
            **({"model_type": "SparseEncoder"} if is_sparse else {}),
            "prompts": prompts,
            "default_prompt_name": "default" if "default" in prompts else None,
            "similarity_fn_name": pooling.similarity,
        },
    }
    if is_sparse:
        return {**contents, _SPARSE_POOLING: dict(sparse_encoders.COMPUTED)}
    flags = {flag: how == pooling.pool for flag, how in _FLAGS.items()}
    return {**contents, _POOLING: {"word_embedding_dimension": config.width, **flags}}


def cross_encoder(weights: Weights) -> Mapping[str, object]:
    """What `config.json` says to CrossEncoder, so that it returns the head's output as it is.

    By default, it would squash the score of a model with one label by a sigmoid.
    """
    if not weights.objective and isinstance(weights.folder, Path):
        file = inside(weights.folder, "config.json")
        if not file.is_file():  # an adapter
            return {}
        with damage_of(file, CheckpointError, "Copy the folder again."):
            content = read_json(file, dict[str, object])
        return {name: content[name] for name in _ACTIVATIONS if name in content}
    if weights.config.head != "classification" or len(weights.config.labels) != 1:
        return {}
    return {_ACTIVATIONS[0]: {"activation_fn": "torch.nn.modules.linear.Identity"}}
