"""Exported decoders in the harness that others evaluate them with (EleutherAI's lm-eval)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import yaml

from tests.conftest import make_dataset
from tests.integration.commands import Samestep
from trainer.models.inputs import Inputs
from trainer.training.weights.loading import load_weights

pytestmark = pytest.mark.long

TEXTS = ("the list of names is", "a class", "the value of this expression is")
CHOICES = (" a number of objects", " the class statement")

EXPERIMENT: dict[str, Any] = {
    "accelerator": "cpu",
    "strategy": "single",
    "objective": {"kind": "causal_lm"},
    "optimizer": {"kind": "adamw", "lr": 3e-3},
    "training": {"steps": 20, "global_batch_size": 10, "micro_batch_size": 10},
}
MODEL = {"vocab_size": 600, "layers": 2, "width": 32, "heads": 2, "ffn_width": 128}


def write_task(folder: Path) -> None:
    """A task of two choices, whose rows are in a local file."""
    rows = [{"text": text, "label": number % 2} for number, text in enumerate(TEXTS)]
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    task = {
        "task": "continues",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": list(CHOICES),
        "target_delimiter": "",
        "doc_to_target": "label",
        "metric_list": [{"metric": "acc"}],
    }
    (folder / "continues.yaml").write_text(yaml.safe_dump(task), encoding="utf-8")


def own_log_probability(run: Path, text: str, choice: str) -> float:
    """Of the tokens of `choice` after the token that begins a text, and `text`."""
    weights = load_weights(str(run))
    tokenizer = weights.load_tokenizer()
    model = weights.model(frozenset({"next_tokens"})).eval()
    vocabulary = tokenizer.vocabulary
    begin = vocabulary.end if vocabulary.cls is None else vocabulary.cls
    assert begin is not None
    context, whole = (tokenizer.encode_batch([each])[0].tolist() for each in (text, text + choice))
    tokens = torch.tensor([[begin, *whole]])
    positions = torch.arange(tokens.shape[1])[None]
    with torch.no_grad():
        inputs = Inputs(tokens=tokens, positions=positions)
        logits = model(inputs, frozenset({"next_tokens"}))["next_tokens"][0]
    found = logits[:-1].log_softmax(-1).gather(1, tokens[0, 1:, None])[:, 0]
    return float(found[len(context) :].sum())


@pytest.mark.parametrize(
    ("kind", "algorithm"), [("gpt2", "bpe"), ("openai_gpt", "bpe"), ("gpt2", "wordpiece")]
)
def test_it_reads_exported_decoders_and_computes_the_same_probabilities(
    kind: str,
    algorithm: Literal["bpe", "wordpiece"],
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Read when they are imported: rows come from the file, and nothing from the Hub.
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    import lm_eval
    from lm_eval.tasks import TaskManager

    data = {"path": str(make_dataset(tmp_path / "data", algorithm)), "sequence_length": 64}
    tree = EXPERIMENT | {
        "output": str(tmp_path / "run"),
        "model": {"kind": kind, **MODEL, "max_positions": 64},
        "data": {**data, "packing": "best_fit", "lanes": 16},
    }
    experiment = tmp_path / "experiment.yaml"
    experiment.write_text(yaml.safe_dump(tree), encoding="utf-8")
    assert samestep("train", experiment).code == 0
    assert samestep("export", tmp_path / "run", tmp_path / "exported").code == 0

    write_task(tmp_path)
    found = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": str(tmp_path / "exported")},
        tasks=["continues"],
        task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
    )
    assert 0 <= found["results"]["continues"]["acc,none"] <= 1
    samples = found["samples"]["continues"]
    assert len(samples) == len(TEXTS)
    for sample in samples:
        theirs = [float(response[0][0]) for response in sample["resps"]]
        ours = [
            own_log_probability(tmp_path / "run", sample["doc"]["text"], choice)
            for choice in CHOICES
        ]
        assert theirs == pytest.approx(ours, rel=1e-4)
