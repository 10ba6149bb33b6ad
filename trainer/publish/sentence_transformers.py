"""Files that `sentence-transformers` needs in addition to a model of `transformers`."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.models import ModelConfig

FILES = (
    "modules.json",
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
    "1_Pooling/config.json",
)
_MODULES = "sentence_transformers.models."


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
