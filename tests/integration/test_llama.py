"""A published Llama goes on as a decoder, and turns into an encoder that predicts masked tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests.conftest import VOCAB_SIZE
from tests.integration.commands import Samestep
from trainer.checkpoint.huggingface import save_folder
from trainer.models.codecs import codec_of
from trainer.models.families import llama
from trainer.training.weights.loading import load_weights

CONFIG = llama.Config(
    vocab_size=VOCAB_SIZE,
    layers=2,
    width=32,
    heads=4,
    kv_heads=2,
    head_width=8,
    ffn_width=48,
    max_positions=64,
)
STILL = ("optimizer.lr=1e-12", "optimizer.weight_decay=0", "schedule.warmup_steps=0")


@pytest.fixture
def published(dataset_folder: Path, tmp_path: Path) -> Path:
    model = CONFIG.build()
    values = {
        name: model.initial_values(name, 0, each.numel(), 0).view_as(each)
        for name, each in model.named_parameters()
    }
    content = codec_of(CONFIG).to_huggingface()
    tensors = codec_of(CONFIG).export_tensors(values)
    save_folder(tmp_path / "published", content, tensors, dataset_folder / "tokenizer")
    return tmp_path / "published"


@pytest.mark.long
def test_a_decoder_becomes_an_encoder(
    published: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """With the weights that it had, and an export that transformers reads as a EuroBERT."""
    run = tmp_path / "run"
    settings = (f"init_from={published}", "training.steps=1", f"output={run}", *STILL)
    refused = samestep("train", experiment_file, *settings, "model=null")
    assert "model.causal=false" in refused.message
    model = ("model=null", "model.causal=false", "model.dropout=0.1")
    result = samestep("train", experiment_file, *settings, *model)
    assert result.code == 0, result.err
    before, after = load_weights(published), load_weights(run)
    assert (before.config.causal, after.config.causal) == (True, False)
    assert after.config.predicts == "tokens"
    for name in before.tensors:
        torch.testing.assert_close(after.tensors[name], before.tensors[name], rtol=0, atol=1e-9)
    assert samestep("export", run, tmp_path / "encoder").code == 0
    theirs = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "encoder")
    assert type(theirs).__name__ == "EuroBertForMaskedLM"
    assert samestep("fill", tmp_path / "encoder", "the [MASK] of a class").code == 0


@pytest.mark.long
def test_a_decoder_goes_on_and_generates(
    published: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    settings = (f"init_from={published}", "training.steps=8", f"output={run}")
    result = samestep("train", experiment_file, *settings, "model=null", "objective=causal_lm")
    assert result.code == 0, result.err
    assert samestep("export", run, tmp_path / "decoder").code == 0
    ours = samestep("generate", run, "the class", "--max-new-tokens", "5")
    assert ours.code == 0, ours.err
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "decoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "decoder")
    ids = tokenizer("the class", return_tensors="pt", add_special_tokens=False)["input_ids"]
    begun = torch.cat([torch.tensor([[model.config.bos_token_id]]), ids], 1)
    found = model.generate(begun, max_new_tokens=5, do_sample=False)[0, begun.shape[1] :]
    assert tokenizer.decode(found, skip_special_tokens=True) in ours.out


@pytest.mark.long
def test_a_decoder_becomes_both_halves_of_an_encoder_decoder(
    t5_experiment: str, tmp_path: Path, samestep: Samestep
) -> None:
    """Both stacks start from its layers, learn to continue texts, and generate."""
    decoder, run = tmp_path / "decoder", tmp_path / "run"
    shape = "width: 32, heads: 4, kv_heads: 2, head_width: 8, ffn_width: 48, max_positions: 64"
    model = f"{{kind: llama, vocab_size: 700, layers: 2, {shape}, tied: false}}"
    settings = ("objective=causal_lm", f"model={model}", "training.steps=2")
    assert samestep("train", t5_experiment, *settings, f"output={decoder}").code == 0
    begin = (f"init_from={decoder}", "model=null", "training.steps=1", *STILL, f"output={run}")
    begin += ("objective={kind: prefix_lm}",)
    refused = samestep("train", t5_experiment, *begin)
    assert "model.decoder_layers=2" in refused.message
    halves = ("model.causal=false", "model.decoder_layers=2")
    refused = samestep("train", t5_experiment, *begin, *halves, "model.start_token=5")
    assert "neither the token that ends a text nor padding" in refused.message
    result = samestep("train", t5_experiment, *begin, *halves, "model.start_token=0")
    assert result.code == 0, result.err
    assert "parameters of the layers start from tensors of other names" in result.err
    before, after = load_weights(decoder).tensors, load_weights(run).tensors
    for ours, theirs in {
        "encoder.1.attention.qkv.kv.weight": "layers.1.attention.qkv.kv.weight",
        "decoder.1.cross_attention.kv.weight": "layers.1.attention.qkv.kv.weight",
        "decoder.0.cross_attention_norm.weight": "layers.0.attention_norm.weight",
        "encoder_norm.weight": "final_norm.weight",
        "head.decoder.weight": "head.decoder.weight",
    }.items():
        torch.testing.assert_close(after[ours], before[theirs], rtol=0, atol=1e-6)
    assert samestep("train", run / "config.yaml", "training.steps=3").code == 0
    assert samestep("generate", run, "the class", "--max-new-tokens", "5").code == 0
    refused = samestep("export", run, tmp_path / "exported")
    assert "decoder_layers 2 cannot be exported" in refused.message
