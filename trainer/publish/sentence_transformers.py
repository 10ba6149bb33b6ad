"""Files that `sentence-transformers` needs in addition to a model of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from samestep.errors import CheckpointError, ConfigError
from samestep.stored_json import damage_of, read_json
from samestep.untrusted import inside, is_plain
from trainer.models import ModelConfig

FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
_MODULES = "sentence_transformers.models."
_KEPT = ["Transformer", "Pooling", "Normalize"]
_LIST, *_SETTINGS, _POOLING = FILES


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
    is_kept = (
        names in (_KEPT[:2], _KEPT)
        and all(kind.startswith("sentence_transformers.") for kind in kinds)
        and paths[:2] == ["", "1_Pooling"]
        and all(map(is_plain, paths[2:]))
    )
    if not is_kept:
        raise ConfigError(
            f"{file} has the modules {', '.join(kinds)}, some of which an export would lose: it "
            "keeps Transformer, Pooling (in 1_Pooling) and Normalize of sentence-transformers. "
            "Remove modules.json to export the encoder alone."
        )
    found: dict[str, object] = {_LIST: modules}
    for name in (*_SETTINGS, _POOLING):
        file = inside(folder, name)
        if file.is_file() or name == _POOLING:
            with damage_of(file, CheckpointError, "Copy the folder again."):
                found[name] = read_json(file, dict[str, object])
    return found


def files(config: ModelConfig, length: int) -> Mapping[str, object]:
    """The content of `FILES`: an encoder, and the mean of its hidden states.

    Args:
        length: maximum number of tokens of a text.
    """
    parts = (("", "Transformer"), ("1_Pooling", "Pooling"))
    contents: tuple[object, ...] = (
        [
            {"idx": number, "name": str(number), "path": path, "type": f"{_MODULES}{kind}"}
            for number, (path, kind) in enumerate(parts)
        ],
        {"max_seq_length": length, "do_lower_case": False},
        {"similarity_fn_name": "cosine"},
        {
            "word_embedding_dimension": config.width,
            "pooling_mode_cls_token": False,
            "pooling_mode_mean_tokens": True,
            "pooling_mode_max_tokens": False,
            "pooling_mode_mean_sqrt_len_tokens": False,
        },
    )
    return dict(zip(FILES, contents, strict=True))
