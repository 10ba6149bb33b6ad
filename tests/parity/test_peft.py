"""What is added to models, against Hugging Face's `peft`.

The same parameters, the same logits, the same folders.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from safetensors import safe_open
from torch import Tensor

from samestep.config import kind_name
from samestep.errors import CheckpointError, ConfigError
from tests.outputs import fill, predict, published
from trainer.checkpoint.huggingface import save_folder
from trainer.models.codecs import codec_of
from trainer.models.families import (
    albert,
    bart,
    bert,
    deberta,
    deberta_v2,
    distilbert,
    electra,
    gpt2,
    llama,
    modernbert,
    mpnet,
    openai_gpt,
    roberta,
    t5,
    xlnet,
)
from trainer.models.peft.huggingface import export_adapter
from trainer.models.peft.kinds import adapters, lora, prefix, prompt
from trainer.training.weights.loading import load_weights

SHAPE: dict[str, Any] = {"vocab_size": 100, "layers": 2, "width": 32, "heads": 2, "ffn_width": 128}
CLASSES: dict[str, Any] = {"head": "classification", "labels": ("x", "y", "z")}
TAGS: dict[str, Any] = {"head": "tagging", "labels": ("O", "B-X", "I-X")}
PLACES: dict[str, Any] = {"max_positions": 40, "dropout": 0.1, "attention_dropout": 0.1}
CONFIGS: dict[str, Any] = {
    "bert-words": bert.Config(**SHAPE, **PLACES),
    "bert": bert.Config(**SHAPE, **PLACES, **CLASSES),
    "bert-tagging": bert.Config(**SHAPE, **PLACES, **TAGS),
    "bert-question_answering": bert.Config(**SHAPE, **PLACES, head="question_answering"),
    "bert-choice": bert.Config(**SHAPE, **PLACES, head="multiple_choice"),
    "roberta": roberta.Config(**SHAPE, **PLACES, **CLASSES),
    # Token embeddings that are narrower than the layers.
    "albert": albert.Config(**SHAPE, **PLACES, **CLASSES, embedding_width=16),
    "electra": electra.Config(**SHAPE, **PLACES, **CLASSES, embedding_width=16),
    "distilbert": distilbert.Config(**SHAPE, **PLACES, **CLASSES),
    "modernbert": modernbert.Config(**SHAPE, **PLACES, **CLASSES),
    "mpnet": mpnet.Config(**SHAPE, **PLACES, **CLASSES),
    "gpt2": gpt2.Config(**SHAPE, **PLACES),
    "gpt2-classes": gpt2.Config(**SHAPE, **PLACES, **CLASSES),
    "llama": llama.Config(**SHAPE, **PLACES, kv_heads=1, head_width=16),
    "llama-classes": llama.Config(**SHAPE, **PLACES, **CLASSES, kv_heads=1, head_width=16),
    "openai-gpt": openai_gpt.Config(**SHAPE, **PLACES),
    "openai-gpt-classes": openai_gpt.Config(**SHAPE, **PLACES, **CLASSES),
    "t5": t5.Config(**SHAPE, head_width=16),
    "t5-gated": t5.Config(**SHAPE, head_width=16, activation="geglu_tanh", tied=False),
    "t5-classes": t5.Config(**SHAPE, head_width=16, **CLASSES),
    "t5-tagging": t5.Config(**SHAPE, head_width=16, **TAGS),
    "t5-question_answering": t5.Config(**SHAPE, head_width=16, head="question_answering"),
    "bart": bart.Config(**SHAPE, **PLACES),
    "bart-classes": bart.Config(**SHAPE, **PLACES, **CLASSES),
}
# Families with relative attention, which have no place for added positions: LoRA alone.
RELATIVE: dict[str, Any] = {
    "deberta": deberta.Config(**SHAPE, **PLACES, **CLASSES),
    "deberta_v2": deberta_v2.Config(**SHAPE, **PLACES, **CLASSES, position_buckets=8, conv_width=3),
    "xlnet": xlnet.Config(**SHAPE, **PLACES, **CLASSES),
}
TEXT_TO_TEXT = ("t5", "bart")
TARGETS = {
    "bert": ("query", "value", "out", "down"),
    "roberta": ("key", "up"),
    "modernbert": ("query", "value", "up"),
    "xlnet": ("up", "down"),
    "gpt2": ("query", "value", "out", "up"),
    "llama": ("query", "value", "gate", "down"),
    "t5": ("query", "cross_value", "cross_query", "up"),
    "t5-gated": ("value", "gate", "cross_out"),
    "bart": ("query", "cross_key", "cross_query", "down"),
}
NAMES = {
    "classification": "SequenceClassification",
    "tagging": "TokenClassification",
    "question_answering": "QuestionAnswering",
    "multiple_choice": "MultipleChoice",
}


def auto(config: Any, folder: Path) -> Any:
    """What transformers makes of a folder for the head of a configuration."""
    of_words = "CausalLM" if config.causal else "MaskedLM"
    if codec_of(config).model_type in TEXT_TO_TEXT:
        of_words = "Seq2SeqLM"
    labels = {"num_labels": len(config.labels)} if config.labels else {}
    padding = {"pad_token_id": 0} if config.causal else {}
    kind = getattr(transformers, f"AutoModelFor{NAMES.get(config.head, of_words)}")
    return kind.from_pretrained(folder, **labels, **padding)


def make(family: str, added: Any) -> tuple[Any, dict[str, Tensor]]:
    """A model with something added, all of it random: B is not zero."""
    config = replace((CONFIGS | RELATIVE)[family], peft=added)
    model = config.build().eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = model.initial_values(name, 0, parameter.numel(), 0).view(parameter.shape)
            parameter.copy_(drawn + 0.05 * torch.randn(parameter.shape, generator=generator))
    return model, {name: parameter.detach() for name, parameter in model.named_parameters()}


def batch(config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Rows of 9 and of 5 positions, as ours and as transformers' models take them."""
    has_encoder = codec_of(config).model_type in TEXT_TO_TEXT
    pooled = config.head in ("classification", "multiple_choice")
    tokens = torch.randint(5, 100, (2, 9), generator=torch.Generator().manual_seed(1))
    real = (torch.arange(9) < torch.tensor([9, 5])[:, None]).int()
    last = real.sum(1, keepdim=True) - 1
    if config.sets_start:
        tokens[:, 0] = config.start_token
    if has_encoder and pooled:  # the token that ends a text
        tokens.scatter_(1, last, config.start_token if config.sets_start else 1)
    tokens = tokens.masked_fill(
        real == 0, config.position_offset - 1 if config.position_offset else 0
    )
    ours = {"tokens": tokens, "segments": real, "positions": torch.arange(9).expand(2, -1)}
    theirs = {"input_ids": tokens, "attention_mask": real}
    if has_encoder and config.head == "language_model":
        ours |= {"target_tokens": tokens, "target_segments": torch.ones_like(tokens)}
        theirs |= {"decoder_input_ids": tokens}
    if pooled:
        ours |= {"predicted": last if config.decoder else torch.zeros(2, 1, dtype=torch.long)}
    if config.head == "multiple_choice":  # the rows are the choices of one example
        theirs = {name: value[None] for name, value in theirs.items()}
    return ours, theirs


def logits_of(output: Any) -> Tensor:
    """Of what a model of transformers gives."""
    logits: Tensor = (
        output.logits
        if "logits" in output
        else torch.stack([output.start_logits, output.end_logits], -1)
    )
    return logits


def real_cells(config: Any, logits: Tensor) -> Tensor:
    """Without positions of padding, or one for each row or choice."""
    if config.head == "multiple_choice":
        return logits.flatten()
    return logits.flatten(0, 1)[:14] if logits.shape[1] == 9 else logits.squeeze(1)


def save(config: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    """The model without what was added."""
    plain = replace(config, peft=None)
    own = {
        name: tensors[name]
        for name in tensors
        if config.peft.initial_std(name, tensors[name].shape) is None
    }
    save_folder(folder, *published(plain, own))
    return folder


def save_base(config: Any, tensors: dict[str, Tensor], folder: Path) -> Path:
    """The language model that a task's began with, or the model itself."""
    if config.head == "language_model":
        return save(config, tensors, folder)
    plain = replace(config, peft=None, head="language_model", labels=())
    drawn = plain.build()
    own = {
        name: drawn.initial_values(name, 0, parameter.numel(), 1).view(parameter.shape)
        if name.startswith("head.") or name not in tensors
        else tensors[name]
        for name, parameter in drawn.named_parameters()
    }
    save_folder(folder, *published(plain, own))
    return folder


@pytest.fixture(params=CONFIGS)
def family(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.mark.parametrize("family", CONFIGS | RELATIVE)
@torch.no_grad()
def test_lora_is_that_of_peft_and_can_be_merged_and_read_back(family: str, tmp_path: Path) -> None:
    wanted = TARGETS.get(family, ("query", "value", "out", "down"))
    model, tensors = make(family, lora.Config(rank=4, alpha=12, targets=wanted))
    config = model.config
    ours, theirs = batch(config)
    expected = real_cells(config, predict(model, **ours))
    base = save_base(config, tensors, tmp_path / "base")
    save_folder(tmp_path / "adapter", *export_adapter(config, tensors, str(base)), adapter=True)
    reference = PeftModel.from_pretrained(auto(config, base), tmp_path / "adapter").eval()
    found = real_cells(config, logits_of(reference(**theirs)))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    plain = replace(config, peft=None)
    merged = plain.build().eval()
    fill(merged, config.peft.merge(model, tensors))
    torch.testing.assert_close(
        real_cells(config, predict(merged, **ours)), expected, rtol=1e-5, atol=1e-5
    )
    without = auto(config, save(config, tensors, tmp_path / "plain"))
    assert not torch.allclose(found, real_cells(config, logits_of(without(**theirs))), atol=1e-3)

    back = load_weights(tmp_path / "adapter")
    assert back.config.head == config.head
    again = back.config.build().eval()
    fill(again, dict(back.tensors))
    torch.testing.assert_close(
        real_cells(config, predict(again, **ours)), expected, rtol=1e-5, atol=1e-5
    )
    assert back.config.peft.targets == tuple(
        target for target in lora.known_targets(model) if target in wanted
    )


@pytest.mark.parametrize("family", ["bert", "gpt2"])
@torch.no_grad()
def test_a_folder_of_peft_starts_a_run(family: str, tmp_path: Path) -> None:
    """With ranks and alphas that differ, and GPT-2's queries, keys and values under one A."""
    model, tensors = make(family, lora.Config())
    base = save(model.config, tensors, tmp_path / "base")
    reference = auto(model.config, base)
    targets, wider = (
        (["query", "output.dense"], "query") if family == "bert" else (["c_attn", "c_fc"], "c_fc")
    )
    task = "SEQ_CLS" if family == "bert" else "CAUSAL_LM"
    settings = LoraConfig(
        task_type=task,
        r=2,
        lora_alpha=3,
        target_modules=targets,
        rank_pattern={wider: 5},
        alpha_pattern={wider: 7},
        init_lora_weights=False,
        fan_in_fan_out=family == "gpt2",
    )
    theirs = get_peft_model(reference, settings).eval()
    theirs.peft_config["default"].base_model_name_or_path = str(base)
    theirs.save_pretrained(tmp_path / "adapter")
    weights = load_weights(tmp_path / "adapter")
    model = weights.config.build().eval()
    model.load_state_dict(dict(weights.tensors))
    ours, inputs = batch(weights.config)
    torch.testing.assert_close(
        real_cells(weights.config, predict(model, **ours)),
        real_cells(weights.config, theirs(**inputs).logits),
        rtol=1e-5,
        atol=1e-5,
    )


NOT_IN_PEFT = {
    "prefix": {
        "bert-words",
        "bert-choice",
        "albert",
        "distilbert",
        "modernbert",
        "mpnet",
        "llama",
        "llama-classes",
        "openai-gpt",
        "openai-gpt-classes",
        "t5",
        "t5-gated",
        "t5-classes",
        "t5-tagging",
        "t5-question_answering",
        "bart",
        "bart-classes",
    },
    "prompt": {
        "bert-words",
        "bert-choice",
        "gpt2-classes",
        "llama-classes",
        "openai-gpt-classes",
        "t5-classes",
        "t5-question_answering",
        "bart-classes",
    },
}


@pytest.mark.parametrize(
    "added",
    [prefix.Config(3), prefix.Config(3, network_width=7), prompt.Config(3)],
    ids=["prefix", "prefix of a network", "prompt"],
)
@torch.no_grad()
def test_a_prefix_and_a_prompt_are_those_of_peft(family: str, added: Any, tmp_path: Path) -> None:
    """Not exported: the library rejects or ignores them, or pools another position."""
    model, tensors = make(family, added)
    kind = kind_name(added)
    if family in NOT_IN_PEFT[kind]:
        theirs = codec_of(model.config).model_type
        refused = f"peft does not compute {kind} as samestep does for {theirs}"
        with pytest.raises(ConfigError, match=refused):
            export_adapter(model.config, tensors, "base")
        return
    base = save_base(model.config, tensors, tmp_path / "base")
    save_folder(
        tmp_path / "adapter", *export_adapter(model.config, tensors, str(base)), adapter=True
    )
    config = model.config
    reference = PeftModel.from_pretrained(auto(config, base), tmp_path / "adapter").eval()
    ours, theirs = batch(config)
    logits = logits_of(reference(**theirs))
    logits = logits[:, -9:] if logits.dim() == 3 else logits  # without those of a prompt
    without = logits_of(auto(config, save(config, tensors, tmp_path / "plain"))(**theirs))
    assert not torch.allclose(real_cells(config, logits), real_cells(config, without), atol=1e-3)
    torch.testing.assert_close(
        real_cells(config, logits), real_cells(config, predict(model, **ours)), rtol=1e-5, atol=1e-5
    )

    back = load_weights(tmp_path / "adapter")
    # The library stores what a network has computed.
    assert back.config.peft == type(added)(3)
    again = back.config.build().eval()
    fill(again, dict(back.tensors))
    torch.testing.assert_close(predict(again, **ours), predict(model, **ours), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"peft_type": "IA3"},
            "peft_type 'IA3'. Train one of LORA, PROMPT_TUNING, PREFIX_TUNING",
        ),
        (
            {"num_virtual_tokens": 2},
            "is 3 x 32, not 2 x 32. Export it again",
        ),
        (
            {"peft_type": "PREFIX_TUNING"},
            "is 3 x 32, not 3 x 128. Export it again",
        ),
    ],
)
def test_what_cannot_be_read_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model, tensors = make("bert", prompt.Config(3))
    content, found = export_adapter(
        model.config, tensors, str(save_base(model.config, tensors, tmp_path / "base"))
    )
    save_folder(tmp_path / "adapter", {**content, **settings}, found, adapter=True)
    with pytest.raises(CheckpointError, match=message):
        load_weights(tmp_path / "adapter")


def test_a_prompt_of_both_stacks_is_refused(tmp_path: Path) -> None:
    """As `peft` makes it for T5, unless it is told otherwise."""
    model, tensors = make("t5", prompt.Config(3))
    base = save_base(model.config, tensors, tmp_path / "base")
    settings = PromptTuningConfig(task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3)
    theirs = get_peft_model(auto(model.config, base), settings)
    theirs.peft_config["default"].base_model_name_or_path = str(base)
    theirs.save_pretrained(tmp_path / "adapter")
    with pytest.raises(
        CheckpointError, match=r"is 6 x 32, not 3 x 32.* Train with num_transformer_submodules=1"
    ):
        load_weights(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("family", "target", "module"),
    [
        ("xlnet", "key", "transformer.layer.0.rel_attn.k"),
        ("deberta_v2", "convolution", "deberta.encoder.conv.conv"),
    ],
)
def test_lora_of_what_is_no_linear_layer_in_transformers_is_refused(
    family: str, target: str, module: str, tmp_path: Path
) -> None:
    model, tensors = make(family, lora.Config(targets=("down", target)))
    with pytest.raises(ConfigError, match=f"has {target}, .*no linear layer.* without --adapter"):
        export_adapter(model.config, tensors, "base")
    model, tensors = make(family, lora.Config(targets=("down",)))
    base = save_base(model.config, tensors, tmp_path / "base")
    content, found = export_adapter(model.config, tensors, str(base))
    found |= {f"base_model.model.{module}.lora_{each}.weight": torch.zeros(4, 4) for each in "AB"}
    save_folder(tmp_path / "adapter", content, found, adapter=True)
    with pytest.raises(
        CheckpointError, match=f"LoRA of {module} is not supported. Train it on lin"
    ):
        load_weights(tmp_path / "adapter")


def test_a_head_that_transformers_has_not_is_refused() -> None:
    config = gpt2.Config(**SHAPE, **PLACES, head="multiple_choice", peft=lora.Config())
    with pytest.raises(ConfigError, match="gpt2 has none"):
        export_adapter(config, {}, "base")


def test_the_head_is_saved_beside(tmp_path: Path) -> None:
    model, tensors = make("bert", lora.Config())
    content, _ = export_adapter(model.config, tensors, "base")
    assert content["modules_to_save"] == ["bert.pooler.dense", "classifier"]
    save_folder(tmp_path / "adapter", *export_adapter(model.config, tensors, "base"), adapter=True)
    with safe_open(tmp_path / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = file.keys()
    assert "base_model.model.classifier.weight" in names
    model, tensors = make("bert", adapters.Config())
    with pytest.raises(ConfigError, match="peft does not compute adapters"):
        export_adapter(model.config, tensors, "base")
