"""Recurrent models by the commands: training, features, generation, plans, what is rejected."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml

from tests.integration import tasks
from tests.integration.commands import Samestep, losses
from tests.outputs import outputs
from trainer.studies.finetune.runs import list_runs
from trainer.studies.finetune.task import find_tasks
from trainer.training.weights.loading import load_weights

MODELS = {
    "lstm": "model={kind: lstm, vocab_size: 600, layers: 2, hidden_size: 32, embedding_width: 32, "
    "dropout: 0.1}",
    "bilm": "model={kind: bilm, vocab_size: 600, layers: 2, hidden_size: 48, proj_size: 32, "
    "embedding_width: 32}",
}
OBJECTIVES = {"lstm": "objective={kind: causal_lm}", "bilm": "objective={kind: bilm}"}
TEXTS = ("the class statement defines a class object", "a", "names in the body")


@pytest.fixture(scope="module")
def runs(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A few steps of each kind."""
    from samestep.cli import main

    found = {}
    for kind in MODELS:
        found[kind] = tmp_path_factory.mktemp(kind) / "run"
        settings = [MODELS[kind], OBJECTIVES[kind], f"output={found[kind]}", "optimizer.lr=1e-2"]
        evaluation = ["training.evaluate_every=12", "training.evaluate_batches=2"]
        assert main(["train", experiment_file, *settings, *evaluation, "data.threads=0"]) == 0
    return found


@pytest.mark.parametrize("kind", MODELS)
def test_it_learns_and_is_evaluated(kind: str, runs: dict[str, Path]) -> None:
    rows = [json.loads(line) for line in (runs[kind] / "metrics.jsonl").read_text().splitlines()]
    losses = [row["train/loss"] for row in rows if "train/loss" in row]
    assert losses[0] == pytest.approx(np.log(600), abs=0.3)
    assert np.mean(losses[-4:]) < losses[0] - 0.2
    (heldout,) = [row for row in rows if "heldout/loss" in row]
    if kind == "bilm":
        mean = (heldout["heldout/forward_loss"] + heldout["heldout/backward_loss"]) / 2
        assert heldout["heldout/loss"] == pytest.approx(mean, rel=1e-6)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "task"),
    [("lstm", "classification"), ("lstm", "regression"), ("bilm", "classification")],
)
def test_it_is_fine_tuned_to_score_texts(
    kind: str,
    task: str,
    runs: dict[str, Path],
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
) -> None:
    """The encoder starts from the language model; evaluation, predictions and labels follow."""
    file = tasks.tune(task, tmp_path, runs[kind], dataset_folder / "tokenizer", "training.steps=90")
    run = tmp_path / f"run-{task}"
    scores = [row for row in tasks.rows_of(run) if f"heldout/{tasks.SCORES[task]}" in row]
    assert scores[-1][f"heldout/{tasks.SCORES[task]}"] > 0.8
    before, after = load_weights(str(runs[kind])), load_weights(str(run))
    assert (before.config.head, after.config.head) == ("language_model", "classification")
    assert not any(name in after.tensors for name in ("head.bias", "head.projection.weight"))
    assert samestep("evaluate", run, "--predictions", tmp_path / "predictions.jsonl").code == 0
    rows = tasks.write(tmp_path / "rows.jsonl", tasks.classification(5, begin=500))
    if task == "classification":
        assert samestep("label", run, rows, "--output", tmp_path / "labeled.jsonl").code == 0
    plan = samestep("plan", file, "--devices", 1, "--strategy", "single")
    assert plan.code == 0, plan.err
    other = samestep("train", file, "objective.lm_weight=0.5", f"output={tmp_path / 'other'}")
    assert other.code == 2


def test_a_suite_has_runs_from_random_weights(
    runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    """A setting of Transformers only, `model.peft`, is not set for them."""
    chosen = find_tasks([str(tasks.write_task("classification", tmp_path))], "ulmfit")
    options = (tmp_path, range(1), False, [])
    (run,) = list_runs(str(runs["lstm"]), chosen, *options, starts=("random",))
    file = tmp_path / "random.yaml"
    file.write_text(yaml.safe_dump(json.loads(json.dumps(run.experiment))))
    resolved = samestep("config", file)
    assert resolved.code == 0, resolved.err
    assert yaml.safe_load(resolved.out)["model"]["kind"] == "lstm"


@pytest.mark.long
def test_a_suite_fine_tunes_it_as_ulmfit_does(
    runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    """The tasks' recipes are for Transformers; this one leaves the model's own dropout."""
    file = tasks.write_task("classification", tmp_path)
    tree = yaml.safe_load(file.read_text())
    tree["experiment"]["model"] = {"attention_dropout": 0.1}
    file.write_text(yaml.safe_dump(tree))
    chosen = find_tasks([str(file)], "ulmfit")
    overrides = ["training.steps=20"]
    (run,) = list_runs(str(runs["lstm"]), chosen, tmp_path, range(1), False, overrides)
    file.write_text(yaml.safe_dump(json.loads(json.dumps(run.experiment))))
    assert samestep("train", file).code == 0
    config = yaml.safe_load((run.folder / "config.yaml").read_text())
    assert (config["model"]["kind"], config["model"]["dropout"]) == ("lstm", 0.1)
    # 96 rows in batches of 64: an epoch of one and a half steps.
    assert config["optimizer"]["unfreeze_every"] == 2
    assert config["optimizer"]["layer_decay"] == pytest.approx(1 / 2.6, rel=1e-3)
    before, after = (load_weights(str(path)).tensors for path in (runs["lstm"], run.folder))
    moved = {
        name: float((after[name] - before[name]).abs().max()) for name in before if name in after
    }
    assert 0 < moved["embeddings.tokens.weight"] < moved["layers.1.weight_ih"]


@pytest.mark.long
def test_a_suite_trains_a_model_on_elmos_frozen_features(
    runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    file = tasks.write_task("classification", tmp_path)
    chosen = find_tasks([str(file)], "elmo")
    overrides = ["training.steps=90", "optimizer.lr=1e-2"]
    (run,) = list_runs(str(runs["bilm"]), chosen, tmp_path, range(1), False, overrides)
    file.write_text(yaml.safe_dump(json.loads(json.dumps(run.experiment))))
    assert samestep("train", file).code == 0
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["heldout/accuracy"] for row in rows if "heldout/accuracy" in row][-1] > 0.8
    before, after = (load_weights(str(path)).tensors for path in (runs["bilm"], run.folder))
    frozen = [name for name in before if name.startswith(("embeddings.", "forward_", "backward_"))]
    assert frozen
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert {"mix.scores", "head_lstm.backward_layers.1.bias"} <= after.keys()


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_two_texts_in_both_orders_share_the_dropped_weights(
    kind: str, runs: dict[str, Path], dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    settings = ("objective.both_orders=true", "model.weight_dropout=0.3", "training.steps=8")
    tasks.tune("regression", tmp_path, runs[kind], dataset_folder / "tokenizer", *settings)
    replayed = samestep("replay", tmp_path / "run-regression", 4, "--exact", "--json")
    found = losses(tmp_path / "run-regression")
    assert json.loads(replayed.out)["loss"] == pytest.approx(found[4], rel=1e-5)


def test_features_of_layers_of_other_widths(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """As in an AWD-LSTM, whose embeddings and last layer are narrower than the others."""
    run, texts, output = tmp_path / "run", tmp_path / "texts.txt", tmp_path / "all.npy"
    settings = [MODELS["lstm"], OBJECTIVES["lstm"], "model.hidden_size=48", f"output={run}"]
    settings += ["model.last_hidden_size=32", "training.steps=2", "schedule.warmup_steps=1"]
    assert samestep("train", experiment_file, *settings, "data.threads=0").code == 0
    texts.write_text("a class\n")
    given = ("features", run, texts, "--output", output)
    assert samestep(*given, "--layers", "all").code == 0
    assert np.load(output).shape == (1, 2, 32)  # of layers 0 and 2
    wrong = samestep(*given[:-1], tmp_path / "one.npy", "--layers", "1")
    assert wrong.code == 2
    assert (
        "--layers is 1, and the model offers no states of that layer; use one of 0, 2" in wrong.err
    )
    assert samestep("neighbors", run, "class", "--in", "a class and an object").code == 0


def test_dropped_weights_of_a_step_are_found_again(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """By a replay, whose micro-batches have one example each."""
    run = tmp_path / "run"
    settings = [MODELS["lstm"], OBJECTIVES["lstm"], "model.weight_dropout=0.4", f"output={run}"]
    settings += ["checkpoint.every=4", "checkpoint.keep_last=9", "optimizer.lr=1e-2"]
    assert samestep("train", experiment_file, *settings, "data.threads=0").code == 0
    replayed = samestep("replay", run, 6, "--exact", "--json")
    assert json.loads(replayed.out)["loss"] == pytest.approx(losses(run)[6], rel=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_features_are_the_states_of_a_text_alone(
    kind: str, runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    """All layers, for a scalar mix: of a biLM the states of both directions."""
    texts, output = tmp_path / "texts.txt", tmp_path / "all.npy"
    texts.write_text("".join(f"{text}\n" for text in TEXTS))
    arguments = ("--layers", "all", "--pool", "none", "--output", output)
    assert samestep("features", runs[kind], texts, *arguments).code == 0
    found, offsets = np.load(output), np.load(tmp_path / "all.offsets.npy")
    width = 64 if kind == "bilm" else 32
    assert found.shape == (offsets[-1], 3, width)
    weights = load_weights(str(runs[kind]))
    tokenizer, model = weights.load_tokenizer(), weights.model()
    for row, text in enumerate(TEXTS):
        (encoded,) = tokenizer.encode_batch([text])
        cls, sep = tokenizer.vocabulary.cls, tokenizer.vocabulary.sep
        after = [sep] if kind == "bilm" else []
        tokens = torch.tensor([[cls, *encoded.tolist(), *after]])
        with torch.no_grad():
            states = outputs(model, *(f"layer.{n}" for n in range(3)), tokens=tokens)
        own = torch.stack([each[0] for each in states], 1).numpy()
        np.testing.assert_allclose(
            found[offsets[row] : offsets[row + 1]], own, rtol=1e-5, atol=1e-5
        )


def test_generation_continues_texts(runs: dict[str, Path], samestep: Samestep) -> None:
    """Greedily, as the whole text would be continued; a biLM cannot."""
    options = ("--max-new-tokens", 6, "--min-new-tokens", 5)
    result = samestep("generate", runs["lstm"], *options, *TEXTS)
    assert result.code == 0
    weights = load_weights(str(runs["lstm"]))
    tokenizer, model = weights.load_tokenizer(), weights.model()
    continued = []
    for text in TEXTS:
        (encoded,) = tokenizer.encode_batch([text])
        tokens = [tokenizer.vocabulary.cls, *encoded.tolist()]
        start = len(tokens)
        for _ in range(5):
            with torch.no_grad():
                (logits,) = outputs(model, "next_tokens", tokens=torch.tensor([tokens]))
            scores = logits[0, -1, : tokenizer.vocabulary.size].clone()
            scores[tokenizer.vocabulary.end] = -torch.inf
            tokens.append(int(scores.argmax()))
        continued.append(tokenizer.decode(tokens[start:]))
    lines = result.out.splitlines()
    assert len(lines) == len(TEXTS)
    for line, text in zip(lines, continued, strict=True):
        assert text in line
    sampled = samestep("generate", runs["lstm"], "--sample", *options, *TEXTS)
    beams = samestep("generate", runs["lstm"], "--beams", 3, *options, *TEXTS)
    assert sampled.code == beams.code == 0
    refused = samestep("generate", runs["bilm"], *TEXTS)
    assert refused.code == 2
    assert "writes no text" in refused.err


@pytest.mark.long
@pytest.mark.parametrize("kind", MODELS)
def test_plans_count_parameters_and_work(
    kind: str, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    """A layer has four gates; a biLM has two stacks, and its head counts in each direction."""
    settings = (MODELS[kind], OBJECTIVES[kind], f"output={tmp_path}", "--devices", 1, "--json")
    plan = json.loads(samestep("plan", experiment_file, *settings, "--strategy", "single").out)
    table = 600 * 32
    if kind == "lstm":
        matrices, vectors, directions = 2 * 4 * 32 * (32 + 32), 2 * 4 * 32 + 600, 1
    else:
        layer = 4 * 48 * (32 + 32) + 48 * 32
        matrices, vectors, directions = 4 * layer, 4 * 4 * 48 + 600, 2
    (of_strategy,) = plan["phases"][0]["plans"]
    assert of_strategy["bytes"]["parameters"] == 4 * (table + matrices + vectors)
    # 31 of 32 positions predict.
    work = 6 * (matrices + 31 / 32 * directions * table) * 12 * 10 * 32
    assert plan["work"]["flops"] == pytest.approx(work, rel=1e-6)


def test_the_time_of_its_kernel_is_not_predicted(
    experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    settings = (MODELS["lstm"], OBJECTIVES["lstm"], f"output={tmp_path}", "--devices", 1)
    result = samestep("plan", experiment_file, *settings, "--throughput", "h100")
    assert result.code == 2
    assert "layers of this model are loops inside of a kernel" in " ".join(result.err.split())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["training.compile=true"], "this model has no layers to compile"),
        (["model.peft={kind: lora}"], "model.peft"),
        (["objective={kind: mlm}"], "needs tokens"),
        (["model.head=tagging"], "labels has 0 names, but a tagging head needs at least 2"),
        (["model.head=classification"], "labels has 0 names, but a classification head needs"),
        (
            [MODELS["bilm"]],
            "bilm, has parameters for previous_tokens, which the objective, causal_lm, does not",
        ),
        (["objective={kind: bilm}"], "the objective, bilm, needs previous_tokens"),
    ],
)
def test_what_it_cannot_do_is_refused(
    settings: list[str], message: str, experiment_file: str, tmp_path: Path, samestep: Samestep
) -> None:
    given = [MODELS["lstm"], OBJECTIVES["lstm"], *settings, f"output={tmp_path / 'run'}"]
    result = samestep("train", experiment_file, *given)
    assert result.code == 2
    assert message in " ".join(result.err.split())


def test_it_has_no_hugging_face_format(
    runs: dict[str, Path], tmp_path: Path, samestep: Samestep
) -> None:
    result = samestep("export", runs["lstm"], tmp_path / "exported")
    assert result.code == 2
    assert "lstm has no Hugging Face format" in " ".join(result.err.split())
