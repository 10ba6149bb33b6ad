"""What is added to models, against Hugging Face's `peft`: the same parameters, the same logits, the same folders."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

from trainer.checkpoint.huggingface import save_folder
from trainer.errors import CheckpointError, ConfigError
from trainer.models import bert, gpt2, roberta, t5
from trainer.models.peft import adapters, lora, prefix, prompt
from trainer.models.peft.huggingface import export_adapter
from trainer.weights import load_weights

SHAPE: dict[str, Any] = {"vocab_size": 100, "layers": 2, "width": 32, "heads": 2, "ffn_width": 128}
CLASSES: dict[str, Any] = {"head": "classification", "labels": ("x", "y", "z")}
PLACES: dict[str, Any] = {"max_positions": 40, "dropout": 0.1, "attention_dropout": 0.1}
CONFIGS: dict[str, Any] = {
    "bert": bert.Config(**SHAPE, **PLACES, **CLASSES),
    "roberta": roberta.Config(**SHAPE, **PLACES, **CLASSES),
    "gpt2": gpt2.Config(**SHAPE, **PLACES),
    "t5": t5.Config(**SHAPE, head_width=16),
    "t5-gated": t5.Config(**SHAPE, head_width=16, activation="geglu_tanh", tied=False),
}
TARGETS = {
    "bert": ("query", "value", "out", "down"),
    "roberta": ("key", "up"),
    "gpt2": ("query", "value", "out", "up"),
    "t5": ("query", "cross_value", "cross_query", "up"),
    "t5-gated": ("value", "gate", "cross_out"),
}
AUTO = {"bert": AutoModelForSequenceClassification, "roberta": AutoModelForSequenceClassification,
        "gpt2": AutoModelForCausalLM, "t5": AutoModelForSeq2SeqLM, "t5-gated": AutoModelForSeq2SeqLM}  # fmt: skip


def make(family: str, added: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model with something added, all of it random: B is not zero."""
    config = replace(CONFIGS[family], peft=added)
    model = config.build().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = model.initial_values(name, 0, parameter.numel(), 0).view(parameter.shape)
            parameter.copy_(drawn + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model, {name: parameter.detach() for name, parameter in model.named_parameters()}


def batch(family: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows of 9 and of 5 cells, as ours and as transformers' models take them."""
    tokens = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    real = (torch.arange(9) < torch.tensor([9, 5])[:, None]).int()
    tokens = tokens.masked_fill(real == 0, 1 if family == "roberta" else 0)
    ours = {"tokens": tokens, "segments": real, "positions": torch.arange(9).expand(2, -1)}
    theirs = {"input_ids": tokens, "attention_mask": real}
    if family.startswith("t5"):
        ours |= {"target_tokens": tokens, "target_segments": torch.ones_like(tokens)}
        theirs |= {"decoder_input_ids": tokens}
    elif family != "gpt2":
        ours |= {"predicted": torch.zeros(2, 1, dtype=torch.long)}
    return ours, theirs


def real_cells(family: str, logits: Tensor) -> Tensor:
    return logits.flatten(0, 1)[:14] if family == "gpt2" else logits.squeeze(1)


def save_base(config: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    plain = replace(config, peft=None)
    own = {name: tensors[name] for name in tensors if config.peft.initial_std(name, tensors[name].shape) is None}
    save_folder(folder, plain.to_huggingface(), plain.export_tensors(own))
    return folder


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@torch.no_grad()
def test_lora_is_that_of_peft_and_can_be_merged_and_read_back(family: str, tmp_path: Path) -> None:
    model, tensors = make(family, lora.Config(rank=4, alpha=12, targets=TARGETS[family]))
    config = model.config
    ours, theirs = batch(family)
    expected = real_cells(family, model(**ours))
    base = save_base(config, tensors, tmp_path / "base")
    save_folder(tmp_path / "adapter", *export_adapter(config, tensors, str(base)), adapter=True)
    reference = PeftModel.from_pretrained(AUTO[family].from_pretrained(base), tmp_path / "adapter").eval()
    found = real_cells(family, reference(**theirs).logits)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    plain = replace(config, peft=None)
    merged = plain.build().eval()
    merged.load_state_dict(config.peft.merge(model, tensors))
    torch.testing.assert_close(real_cells(family, merged(**ours)), expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, real_cells(family, AUTO[family].from_pretrained(base)(**theirs).logits), atol=1e-3)

    back = load_weights(tmp_path / "adapter")
    again = back.config.build().eval()
    again.load_state_dict(dict(back.tensors))
    torch.testing.assert_close(real_cells(family, again(**ours)), expected, rtol=1e-5, atol=1e-5)
    assert back.config.peft.targets == tuple(
        target for target in lora.known_targets(model) if target in TARGETS[family]
    )


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@torch.no_grad()
def test_a_folder_of_peft_starts_a_run(family: str, tmp_path: Path) -> None:
    """With ranks and alphas that differ, and GPT-2's queries, keys and values under one A."""
    _, tensors = make(family, lora.Config())
    base = save_base(make(family, lora.Config())[0].config, tensors, tmp_path / "base")
    reference = AUTO[family].from_pretrained(base)
    targets, wider = (["query", "output.dense"], "query") if family == "bert" else (["c_attn", "c_fc"], "c_fc")
    task = "SEQ_CLS" if family == "bert" else "CAUSAL_LM"
    settings = LoraConfig(task_type=task, r=2, lora_alpha=3, target_modules=targets, rank_pattern={wider: 5},
                          alpha_pattern={wider: 7}, init_lora_weights=False, 
                          fan_in_fan_out=family == "gpt2")  # fmt: skip
    theirs = get_peft_model(reference, settings).eval()
    theirs.peft_config["default"].base_model_name_or_path = str(base)
    theirs.save_pretrained(tmp_path / "adapter")
    weights = load_weights(tmp_path / "adapter")
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    ours, inputs = batch(family)
    torch.testing.assert_close(
        real_cells(family, model(**ours)), real_cells(family, theirs(**inputs).logits), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("added", [prefix.Config(3), prompt.Config(3)], ids=["prefix", "prompt"])
@pytest.mark.parametrize("family", ["bert", "roberta", "gpt2", "t5"])
@torch.no_grad()
def test_a_prefix_and_a_prompt_are_those_of_peft(family: str, added: Any, tmp_path: Path) -> None:
    model, tensors = make(family, added)
    if family == "t5" and isinstance(added, prefix.Config):
        with pytest.raises(ConfigError, match="no prefix for T5"):
            export_adapter(model.config, tensors, "base")
        return
    base = save_base(model.config, tensors, tmp_path / "base")
    save_folder(tmp_path / "adapter", *export_adapter(model.config, tensors, str(base)), adapter=True)
    reference = PeftModel.from_pretrained(AUTO[family].from_pretrained(base), tmp_path / "adapter").eval()
    ours, theirs = batch(family)
    logits = reference(**theirs).logits
    logits = logits[:, -9:] if family == "gpt2" else logits
    without = real_cells(family, AUTO[family].from_pretrained(base)(**theirs).logits)
    assert not torch.allclose(real_cells(family, logits), without, atol=1e-3)
    torch.testing.assert_close(real_cells(family, logits), real_cells(family, model(**ours)), rtol=1e-5, atol=1e-5)
    with pytest.raises(CheckpointError, match="only LORA can be read"):
        load_weights(tmp_path / "adapter")


def test_the_head_is_saved_beside(tmp_path: Path) -> None:
    model, tensors = make("bert", lora.Config())
    content, _ = export_adapter(model.config, tensors, "base")
    assert content["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    save_folder(tmp_path / "adapter", *export_adapter(model.config, tensors, "base"), adapter=True)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = file.keys()
    assert "base_model.model.classifier.weight" in names
    model, tensors = make("bert", adapters.Config())
    with pytest.raises(ConfigError, match="no adapters"):
        export_adapter(model.config, tensors, "base")
