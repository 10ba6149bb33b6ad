"""CamemBERT and XLM-RoBERTa: RoBERTa's architecture under other names, which exports keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import samestep
from samestep.errors import CheckpointError
from tests.outputs import outputs, predict
from tests.parity.heads import names_of
from tests.parity.pairs import assert_gradients_are_equal, close, exported, saved
from tests.unit.data_pipeline.tokenizers.test_ten_scripts import TEXTS, folder_of
from trainer.models.codecs import codec_of
from trainer.models.families import roberta
from trainer.publish.export import export
from trainer.training.weights.loading import load_weights

TYPES = {"camembert": "Camembert", "xlm-roberta": "XLMRoberta"}
ENDINGS = {
    "ForMaskedLM": (),
    "ForSequenceClassification": ("no", "maybe", "yes"),
    "ForTokenClassification": ("O", "B-PER"),
    "ForQuestionAnswering": (),
    "ForMultipleChoice": (),
}
SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 42,
    "type_vocab_size": 1,
    "layer_norm_eps": 1e-5,
}


def make(model_type: str, folder: Path, ending: str, **changes: Any) -> Any:
    names = names_of(ENDINGS.get(ending, ()))
    config = getattr(transformers, f"{TYPES[model_type]}Config")(**SHAPE | names | changes)
    theirs = getattr(transformers, f"AutoModel{ending}").from_config(config)
    return saved(theirs.eval(), folder)


def rows() -> dict[str, Tensor]:
    real = torch.arange(20) < torch.tensor([[20], [13], [1], [7]])
    tokens = torch.randint(5, 300, real.shape, generator=torch.Generator().manual_seed(1))
    positions = torch.arange(20).expand(4, -1)
    return {"tokens": tokens.where(real, 1), "segments": real.int(), "positions": positions}


@pytest.mark.parametrize("ending", ENDINGS)
@pytest.mark.parametrize("model_type", TYPES)
def test_states_logits_gradients_and_exports(model_type: str, ending: str, tmp_path: Path) -> None:
    theirs = make(model_type, tmp_path / "theirs", ending)
    weights = load_weights(tmp_path / "theirs")
    assert weights.config.published_as == model_type
    assert weights.config.labels == ENDINGS[ending]
    model = weights.model()
    batch = rows()
    real = batch["segments"].bool()
    shape = (2, 2, 20) if ending == "ForMultipleChoice" else (4, 20)
    inputs = {
        "input_ids": batch["tokens"].view(shape),
        "attention_mask": batch["segments"].view(shape),
    }
    found = theirs(**inputs, output_hidden_states=True)
    names = [f"layer.{number}" for number in range(3)]
    for ours, expected in zip(outputs(model, *names, **batch), found.hidden_states, strict=True):
        close(ours[real], expected[real])

    pooled = weights.config.head in ("classification", "multiple_choice")
    first = torch.zeros(4, 1, dtype=torch.int64) if pooled else None
    logits = predict(model, **batch, predicted=first)
    logits = logits.view(2, 2) if ending == "ForMultipleChoice" else logits
    logits = logits[:, 0] if ending == "ForSequenceClassification" else logits
    used = real if logits.shape[:2] == real.shape else slice(None)
    theirs_logits = their_logits(found)
    close(logits[used], theirs_logits[used])
    losses = [
        each[used].flatten(0, -2).log_softmax(-1)[:, 0].mean() for each in (logits, theirs_logits)
    ]
    close(*losses)
    for loss in losses:
        loss.backward()
    assert_gradients_are_equal(weights.config, theirs, model)

    auto = getattr(transformers, f"AutoModel{ending}")
    again = exported(auto, weights.config, model, tmp_path / "ours")
    assert type(again) is type(theirs)
    close(their_logits(again(**inputs))[used], theirs_logits[used])
    assert load_weights(tmp_path / "ours").config == weights.config


def their_logits(found: Any) -> Tensor:
    if "start_logits" in found:
        return torch.stack([found.start_logits, found.end_logits], -1)
    logits: Tensor = found.logits
    return logits


@pytest.mark.long
@pytest.mark.parametrize("model_type", TYPES)
def test_a_published_folder_and_its_export_have_the_same_tokens(
    model_type: str, tmp_path: Path
) -> None:
    """Ids with special tokens, of texts and pairs; and the ids that begin and end texts."""
    folder = folder_of(tmp_path, model_type)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    model = make(model_type, folder, "ForMaskedLM", vocab_size=len(theirs))
    export(str(folder), str(tmp_path / "again"))
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(TEXTS, TEXTS[::-1])["input_ids"] == theirs(TEXTS, TEXTS[::-1])["input_ids"]
    content = json.loads((tmp_path / "again" / "config.json").read_text())
    assert content["architectures"] == [type(model).__name__]
    named = [content[f"{role}_token_id"] for role in ("bos", "pad", "eos")]
    assert named == [theirs.bos_token_id, theirs.pad_token_id, theirs.eos_token_id]
    text = "first last"
    (states,) = samestep.load_model(folder).encode([text])
    with torch.no_grad():
        found = model.base_model(**theirs(text, return_tensors="pt")).last_hidden_state[0]
    close(states, found)


def test_a_model_that_is_not_one_of_them_is_refused(tmp_path: Path) -> None:
    """XLM-RoBERTa-XL has its norms before each branch."""
    config = transformers.XLMRobertaXLConfig(**SHAPE)
    transformers.XLMRobertaXLForMaskedLM(config).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"model_type 'xlm-roberta-xl', which samestep does"):
        load_weights(tmp_path)


def test_a_new_model_is_published_under_the_name_that_is_set() -> None:
    for name, ids in {"roberta": (0, 2), "camembert": (5, 6), "xlm-roberta": (0, 2)}.items():
        content = codec_of(roberta.Config(published_as=name)).to_huggingface()
        assert content["model_type"] == name
        assert (content["bos_token_id"], content["eos_token_id"]) == ids
