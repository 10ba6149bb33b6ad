"""ELMo by the commands: words, their characters, frozen layers under a task's own model."""

from __future__ import annotations

import json
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import pytest
import torch

from samestep.cli import main
from tests.integration import tasks
from tests.integration.commands import Samestep, Start
from tests.outputs import outputs
from trainer.training.weights.loading import load_weights

MODEL = (
    "model={kind: bilm, vocab_size: 400, layers: 2, hidden_size: 48, proj_size: 32, "
    "embedding_width: 32, tied: false, characters: {longest: 12, width: 8, "
    "filters: [[1, 8], [2, 16], [3, 24]], highways: 1}}"
)
NEW = ("value", *tasks.NAMES[:5])  # the words of the names that are to be tagged


@pytest.fixture(scope="module")
def run(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A biLM of words, of a text without the task's names."""
    folder = tmp_path_factory.mktemp("elmo")
    paragraphs = [p for name in sorted(topics) for p in topics[name].split("\n\n") if p.strip()]
    rows = []
    for paragraph in paragraphs[::2]:
        words = [word for word in paragraph.split() if not any(new in word.lower() for new in NEW)]
        rows.append({"text": " ".join(words) or "nothing"})
    dataset = tasks.build_words(folder, rows, vocab_size=400, lowercase=True)
    settings = (MODEL, "objective={kind: bilm}", f"data.path={dataset}")
    evaluation = ("training.evaluate_every=12", "training.evaluate_batches=2")
    arguments = (*settings, *evaluation, f"output={folder / 'run'}", "optimizer.lr=1e-2")
    assert main(["train", experiment_file, *arguments, "data.threads=0"]) == 0
    return folder / "run"


def test_it_learns(run: Path) -> None:
    rows = tasks.rows_of(run)
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[0] == pytest.approx(np.log(400), abs=0.4)
    assert np.mean(losses[-4:]) < losses[0] - 0.3
    tokenizer = load_weights(str(run)).load_tokenizer()
    spellings = tokenizer.spellings()
    assert spellings[:5] == ["[PAD]", "[UNK]", "\x02", "\x03", "[MASK]"]
    assert not set(NEW) & set(spellings)
    (ids,) = tokenizer.encode_batch(["The VALUE of an object, unbelievably"])
    assert tokenizer.decode(ids.tolist()).split()[:3] == ["the", "[UNK]", "of"]


@pytest.mark.long
def test_a_task_brings_new_words(
    run: Path, tmp_path: Path, samestep: Samestep, start: Start
) -> None:
    """ELMo's way to tag, on frozen layers. All names are words that pre-training has not seen."""
    (tmp_path / "words.txt").write_text("\n".join(NEW))
    larger = tmp_path / "larger"
    options = ("data", "extend", run / "tokenizer", tmp_path / "words.txt", larger)
    assert samestep(*options, "--whole-words").code == 0
    size = load_weights(str(run)).load_tokenizer().vocabulary.size + len(NEW)
    frozen = "frozen=[embeddings,forward_layers,backward_layers]"
    settings = (
        *(frozen, f"model.vocab_size={size}", "model.scalar_mix=true", "model.head_lstm=1"),
        *("model.crf=true", "objective.crf=true", "optimizer.lr=2e-2", "model.scalar_mix_l2=0.1"),
    )
    experiment = tasks.tune("tagging", tmp_path, run, larger, *settings)
    tuned = tmp_path / "run-tagging"
    scores = [row for row in tasks.rows_of(tuned) if "heldout/entity_f1" in row]
    assert scores[-1]["heldout/entity_f1"] > 0.8
    weights = load_weights(str(tuned))
    assert weights.config.head == "tagging"
    assert not any(name.startswith("head.decoder") for name in weights.tensors)
    before = load_weights(str(run)).tensors
    kept = [name for name in before if name.startswith(("embeddings.", "forward_", "backward_"))]
    assert all(torch.equal(weights.tensors[name], before[name]) for name in kept)
    assert any(".characters." in name for name in kept)
    assert samestep("evaluate", tuned).code == 0
    # Each new word has an embedding of its own, from its characters.
    model, tokenizer = weights.model(), weights.load_tokenizer()
    ids = torch.tensor([np.concatenate(tokenizer.encode_batch(list(NEW))).tolist()])
    assert ids.shape == (1, len(NEW))
    with torch.no_grad():
        (embedded,) = outputs(model, "layer.0", tokens=ids)
    assert len(embedded[0].unique(dim=0)) == len(NEW)
    # Without the extension, all of them are the unknown word.
    other = tmp_path / "unknown"
    other.mkdir()
    tasks.tune("tagging", other, run, run / "tokenizer", settings[0], *settings[2:])
    unknown = [row for row in tasks.rows_of(other / "run-tagging") if "heldout/entity_f1" in row]
    assert unknown[-1]["heldout/entity_f1"] <= scores[-1]["heldout/entity_f1"]
    # The same run in three processes.
    tasks.assert_same_in_three_processes(start, experiment, tuned, tmp_path / "three", *settings)


@pytest.mark.long
def test_features_and_plans(
    run: Path, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    texts = tmp_path / "texts.txt"
    texts.write_text("a statement and its target\n")
    arguments = ("--layers", "all", "--pool", "none", "--output", tmp_path / "all.npy")
    assert samestep("features", run, texts, *arguments).code == 0
    assert np.load(tmp_path / "all.npy").shape[1:] == (3, 64)
    settings = (MODEL, "objective={kind: bilm}", f"output={tmp_path}", "--devices", 1, "--json")
    result = samestep("plan", experiment_file, *settings, "--strategy", "single")
    assert result.code == 0, result.err
    (plan,) = json.loads(result.out)["phases"][0]["plans"]
    parameters = load_weights(str(run)).tensors
    assert plan["bytes"]["parameters"] == 4 * sum(parameters[name].numel() for name in parameters)
    # The table in which neighbors are looked up is computed from all spellings.
    result = samestep("neighbors", run, "statement", "--in", "a statement and a test", "--top", 2)
    assert result.code == 0, result.err
    model = load_weights(str(run)).model()
    tokens = torch.arange(model.config.vocab_size)[None]
    with torch.no_grad():
        (embedded,) = outputs(model, "layer.0", tokens=tokens)
    assert torch.allclose(model.token_table(), embedded[0, :, : embedded.shape[2] // 2])
