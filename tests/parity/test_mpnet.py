"""MPNet against its class in transformers: long rows, folders of sentence-transformers, bad ones.

`test_huggingface.py` and `test_task_heads.py` compare heads, losses, gradients and exports.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

import samestep
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import outputs, predict
from tests.parity.pairs import assert_gradients_are_equal, close, load, saved
from tests.unit.data_pipeline.tokenizers.test_ten_scripts import folder_of
from trainer.models.codecs import codec_of
from trainer.models.families import mpnet
from trainer.publish.export import export
from trainer.training.weights.loading import load_weights

SHAPE: dict[str, Any] = {
    "vocab_size": 700,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 172,
}
PARTS = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
BIAS = "mpnet.encoder.relative_attention_bias.weight"


def make(folder: Path, ending: str = "ForMaskedLM", **changes: Any) -> Any:
    config = transformers.MPNetConfig(**SHAPE | changes)
    return saved(getattr(transformers, f"AutoModel{ending}").from_config(config).eval(), folder)


def rows() -> dict[str, Tensor]:
    """Rows longer than the largest distance with a bucket of its own, with padding."""
    real = torch.arange(170) < torch.tensor([[170], [23], [1]])
    tokens = torch.randint(5, 700, real.shape, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(170).expand(3, -1)
    return {"tokens": tokens.where(real, 1), "segments": real.int(), "positions": positions}


def test_states_logits_loss_and_gradients_of_long_rows(tmp_path: Path) -> None:
    theirs = make(tmp_path)
    config, model = load(mpnet.Config, tmp_path)
    assert config.max_positions == 170
    batch = rows()
    real = batch["segments"].bool()
    labels = batch["tokens"].where(real, -100)
    found = theirs(
        input_ids=batch["tokens"],
        attention_mask=batch["segments"],
        labels=labels,
        output_hidden_states=True,
    )
    names = [f"layer.{number}" for number in range(3)]
    for ours, expected in zip(outputs(model, *names, **batch), found.hidden_states, strict=True):
        close(ours[real], expected[real])
    logits = predict(model, **batch)[real]
    close(logits, found.logits[real])
    loss = F.cross_entropy(logits, labels[real])
    close(loss, found.loss)
    loss.backward()
    found.loss.backward()
    assert_gradients_are_equal(config, theirs, model)


def test_distances_count_in_packed_sequences(tmp_path: Path) -> None:
    theirs = make(tmp_path)
    _, model = load(mpnet.Config, tmp_path)
    tokens = rows()["tokens"][:1]
    parts = (slice(0, 40), slice(40, 170))
    packed = {
        "tokens": tokens,
        "segments": torch.tensor([[1] * 40 + [2] * 130]),
        "positions": torch.cat([torch.arange(40), torch.arange(130)])[None],
    }
    found = predict(model, **packed)
    for part in parts:
        close(found[:, part], theirs(input_ids=tokens[:, part]).logits)


@pytest.mark.long
def test_a_folder_of_sentence_transformers(tmp_path: Path) -> None:
    """As all-mpnet-base-v2 is published: no prefix in names, a pooler, mean and normalization."""
    from sentence_transformers import SentenceTransformer

    folder = folder_of(tmp_path, "mpnet")
    make(folder, "", vocab_size=2000)
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (kind, path) in enumerate(PARTS.items())
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 128}')
    texts = ["first last", "x y, z!"]
    expected = SentenceTransformer(str(folder), device="cpu").encode(texts)
    states = samestep.load_model(folder).encode(texts)
    found = F.normalize(torch.stack([each.mean(0) for each in states]), dim=1)
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)
    export(str(folder), str(tmp_path / "again"))
    again = SentenceTransformer(str(tmp_path / "again"), device="cpu").encode(texts)
    np.testing.assert_allclose(again, expected, atol=1e-6)


def test_folders_of_other_models_are_refused(tmp_path: Path) -> None:
    make(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name: tensors[name] for name in tensors if name != BIAS}, tmp_path / "model.tmp")
    (tmp_path / "model.tmp").rename(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{BIAS} is missing. Use the config.json that"):
        load_weights(tmp_path)
    file = tmp_path / "config.json"
    changed = json.loads(file.read_text()) | {"relative_attention_num_buckets": 64}
    file.write_text(json.dumps(changed))
    with pytest.raises(ConfigError, match=r"relative_attention_num_buckets 64.* needs 32"):
        load_weights(tmp_path)


@pytest.mark.parametrize("setting", [{"type_vocab": 2}, {"nsp": True}])
def test_bad_settings_are_refused(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"MPNet has none. Leave it out, or use kind: bert"):
        mpnet.Config(**setting)


def test_a_left_to_right_model_is_not_exported() -> None:
    with pytest.raises(ConfigError, match="transformers has no causal mpnet"):
        codec_of(mpnet.Config(causal=True)).to_huggingface()


def test_the_released_size() -> None:
    """microsoft/mpnet-base, with its head."""
    with torch.device("meta"):
        model = mpnet.Config().build()
    theirs = transformers.MPNetConfig(max_position_embeddings=514)
    with torch.device("meta"):
        reference = transformers.MPNetForMaskedLM(theirs)
    assert model.max_sequence_length == 512
    assert sum(p.numel() for p in model.parameters()) == reference.num_parameters()
