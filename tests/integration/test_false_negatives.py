"""A learned temperature and a guide in real runs: at any world size, resumed and exported."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch import Tensor
from torch.distributed.tensor import DTensor

from samestep.cli import main
from samestep.config import load
from tests.conformance.worker import make_trainer, run_once
from tests.integration import tasks
from tests.integration.commands import Samestep
from tests.integration.test_embeddings import SHORT, STUDENT, pairs
from tests.processes import run_ranks
from trainer.models.inputs import Inputs
from trainer.strategies.world import World
from trainer.training.experiment import Experiment
from trainer.training.passes import accumulate_gradients, means, on_device
from trainer.training.weights.loading import load_weights

LEARNED = ("objective.learn_temperature=true", "model.logit_scale=true")
QUIET = ["training.evaluate_every=null", "schedule.warmup_steps=0"]


@pytest.fixture(scope="module")
def folder(dataset_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of retrieval with hard negatives, an experiment, and a guide of two steps."""
    folder = tmp_path_factory.mktemp("false_negatives")
    texts = pairs(120)
    rows = [
        {
            "query": row["a"],
            "positive": [row["b"], texts[(number + 18) % 120]["b"]],
            "negatives": [texts[(number + step) % 120]["b"] for step in (5, 9, 31)],
        }
        for number, row in enumerate(texts)
        if row["label"] == "same"
    ]
    lengths = {"query_length": 14, "passage_length": 16}
    sections = {
        "model": STUDENT,
        "objective": {"kind": "contrastive", "negatives": 2, **lengths},
        "output": str(folder / "guide"),
    }
    tree = tasks.retrieval(folder, rows, 60, dataset_folder / "tokenizer", 62, **sections)
    tree["training"]["steps"] = 2
    tree["schedule"]["warmup_steps"] = 0
    file = folder / "retriever.yaml"
    file.write_text(yaml.safe_dump(tree))
    assert main(["train", str(file), *QUIET, "model.width=24", "seed=7"]) == 0
    return folder


def reference(trainer: Any, micro_batches: Any) -> dict[str, Tensor]:
    """Loss and gradients of a whole batch by plain autograd, row by row."""
    objective, model = trainer.objectives[0], trainer.model
    batches = [on_device(trainer.strategy, each) for each in micro_batches]
    batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}

    def embed(of: Any) -> tuple[Tensor, Any]:
        needs = frozenset({"embedding", *(["logit_scale"] if of is model else [])})
        found = of(Inputs.of(batch), needs)
        texts = [
            [hidden[own == number].mean(0) for number in range(1, 5)]
            for hidden, own in zip(found["embedding"], batch["segments"], strict=True)
        ]
        return torch.stack([torch.stack(row) for row in texts]), found.get("logit_scale")

    with torch.no_grad():
        guided = F.normalize(embed(objective._guide)[0], dim=-1)
    embedded, logit_scale = embed(model)
    vectors, scale = F.normalize(embedded, dim=-1), (logit_scale - 1).exp() / 0.05
    texts = batch["texts"].view(len(guided), 4, 2).tolist()
    passages = batch["passages"].view(len(guided), 5, 2).tolist()
    losses, masked = [], 0
    for row, (query, positive) in enumerate(zip(texts, texts, strict=True)):
        scores = [vectors[row, 0] @ vectors[row, 1] * scale]
        right = guided[row, 0] @ guided[row, 1]
        for other in range(len(texts)):
            for text in range(1, 4):
                equal = texts[other][text] in (query[0], positive[1])
                equal |= text == 1 and texts[other][0] == query[0]
                equal |= passages[other][text - 1] in passages[row][3:]
                near = guided[row, 0] @ guided[other, text] > right - 0.01
                masked += bool(near) and not equal
                if (other, text) != (row, 1) and not equal and not near:
                    scores.append(vectors[row, 0] @ vectors[other, text] * scale)
        losses.append(-torch.stack(scores).log_softmax(0)[0])
    assert masked > len(texts), "the guide masks nothing"
    loss = torch.stack(losses).mean()
    loss.backward()
    found = {name: each.grad for name, each in model.named_parameters()}
    return {"loss": loss.detach(), **found}


def gradients(file: str, overrides: list[str], with_reference: bool) -> dict[str, np.ndarray]:
    """The loss of the first step, and its gradient of each parameter."""
    world = World.start(60)
    world.connect("gloo")
    trainer = make_trainer(load(Experiment, file, overrides), world)
    micro_batches = next(iter(trainer.loader))
    trainer.model.train()
    if with_reference:
        found = reference(trainer, micro_batches)
    else:
        strategy = trainer.strategy
        metrics = accumulate_gradients(
            trainer.model, trainer.objectives[0], strategy, micro_batches
        )
        found = {"loss": torch.tensor(means(metrics, strategy)["loss"])}
        for name, parameter in strategy.parameters.items():
            gradient = parameter.grad
            whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
            found[name] = whole
    trainer.loader.close()
    arrays = {name: each.numpy().copy() for name, each in found.items()}
    world.close()
    return arrays


@pytest.mark.long
def test_gradients_are_those_of_plain_autograd_at_any_world_size(
    folder: Path, tmp_path: Path
) -> None:
    """A learned temperature, a guide, hard negatives and known positives; dropout is on."""
    file, guide = str(folder / "retriever.yaml"), f"{{path: {folder / 'guide'}, margin: 0.01}}"
    settings = [*QUIET, *LEARNED, f"objective.guide={guide}", "training.micro_batch_size=2"]
    settings.append("objective.known_positives=2")
    alone = [*settings, "strategy=single", f"output={tmp_path / 'one'}"]
    (expected,) = run_ranks(1, gradients, file, alone, True)
    assert abs(expected["logit_scale"]) > 0.01
    for world_size, strategy in ((1, "single"), (2, "ddp"), (3, "ddp"), (2, "fsdp"), (3, "fsdp")):
        run = [*settings, f"strategy={strategy}", f"output={tmp_path / strategy}-{world_size}"]
        for found in run_ranks(world_size, gradients, file, run, False):
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_a_learned_temperature_and_a_guide_go_on_after_a_resume(
    folder: Path, tmp_path: Path
) -> None:
    """Two processes take six steps, and three go on after the third."""
    file = str(folder / "retriever.yaml")
    settings = [*QUIET, *LEARNED, f"objective.guide={{path: {folder / 'guide'}}}"]
    settings += ["checkpoint.every=3", "training.steps=6", "optimizer.lr=0.02"]
    alone = [*settings, "strategy=single", f"output={tmp_path / 'one'}"]
    (one,) = run_ranks(1, run_once, file, alone)
    fixed = [*settings, "strategy=single", f"output={tmp_path / 'fixed'}"]
    fixed += ["objective.learn_temperature=false", "model.logit_scale=false"]
    (other,) = run_ranks(1, run_once, file, fixed)
    assert one[0] == pytest.approx(other[0], rel=1e-6)
    assert abs(one[5] - other[5]) > 1e-3
    shared = [*settings, "strategy=fsdp", f"output={tmp_path / 'run'}"]
    two = run_ranks(2, run_once, file, [*shared, "training.micro_batch_size=2"])[0]
    np.testing.assert_allclose(two, one, rtol=2e-5)
    three = run_ranks(3, run_once, file, shared, 3)[0]
    np.testing.assert_allclose(three, one[3:], rtol=2e-5)


@pytest.mark.long
def test_a_learned_temperature_is_logged_and_stays_out_of_exports(
    folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    run = tmp_path / "run"
    file = folder / "retriever.yaml"
    guide = f"objective.guide.path={folder / 'guide'}"
    settings = (
        *LEARNED,
        guide,
        "training.steps=4",
        "training.evaluate_every=4",
        "optimizer.lr=0.1",
    )
    assert samestep("train", file, f"output={run}", *settings).code == 0
    rows = tasks.rows_of(run)
    learned = [row["train/temperature"] for row in rows if "train/temperature" in row]
    assert learned[0] == pytest.approx(0.05)
    assert len({*learned}) == 4
    (heldout,) = [row for row in rows if "heldout/temperature" in row]
    weights = load_weights(str(run))
    parameter = float(weights.tensors["logit_scale"])
    assert heldout["heldout/temperature"] == pytest.approx(0.05 * np.exp(1 - parameter), rel=1e-4)
    assert samestep("evaluate", run, "--predictions", tmp_path / "rows.jsonl").code == 0
    assert samestep("replay", run, 2, "--exact").code == 0
    assert samestep("export", run, tmp_path / "hf").code == 0
    exported = load_weights(str(tmp_path / "hf"))
    assert not exported.config.logit_scale
    assert "logit_scale" not in exported.tensors
    # A new run begins at its own temperature, with and without a learned one.
    again = (*SHORT, f"init_from={run}", "training.steps=1", f"output={tmp_path / 'again'}")
    without = yaml.safe_load(file.read_text())
    del without["model"]
    (tmp_path / "again.yaml").write_text(yaml.safe_dump(without))
    learn = "objective.learn_temperature=true"
    assert samestep("train", tmp_path / "again.yaml", *again, learn).code == 0
    first = tasks.rows_of(tmp_path / "again")[0]
    assert first["train/temperature"] == pytest.approx(0.05)
    fresh = f"output={tmp_path / 'plain'}"
    assert samestep("train", tmp_path / "again.yaml", *again[:-1], fresh).code == 0
    assert not load_weights(str(tmp_path / "plain")).config.logit_scale
    # A run keeps its guide.
    more = f"objective.guide.path={tmp_path / 'again'}"
    refused = samestep("train", file, f"output={run}", *settings, "training.steps=6", more)
    assert refused.code == 1
    assert "objective.guide.path names other weights than the run has" in refused.message


@pytest.mark.long
def test_wrong_guides_and_models_are_refused(
    folder: Path, finished_run: Path, tmp_path: Path, samestep: Samestep
) -> None:
    file, run = folder / "retriever.yaml", f"output={tmp_path / 'run'}"
    refused = samestep("train", file, run, f"objective.guide.path={finished_run}")
    assert refused.code == 2
    assert "has head language_model and embeds no texts" in refused.message
    other = shutil.copytree(folder / "guide", tmp_path / "other")
    for tokenizer in other.rglob("tokenizer.json"):
        content = json.loads(tokenizer.read_text())
        vocabulary = content["model"]["vocab"]
        vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
        tokenizer.write_text(json.dumps(content))
    refused = samestep("train", file, run, f"objective.guide.path={other}")
    assert refused.code == 2
    assert f"{other}" in refused.message
    assert "was trained with another tokenizer than" in refused.message
    refused = samestep("train", file, run, "objective.learn_temperature=true")
    assert refused.code == 2
    assert "set model.logit_scale=true or objective.learn_temperature=false" in refused.message
    refused = samestep("train", file, run, "objective.known_positives=1")
    assert refused.code == 1
    assert "the row has 2 positives and objective.known_positives is 1" in refused.message
    all_three = (
        f"objective.guide.path={folder / 'guide'}",
        "objective.known_positives=2",
        *LEARNED,
    )
    assert samestep("plan", file, "--devices", 2, *all_three).code == 0
    refused = samestep("train", file, run, "model.logit_scale=true")
    assert refused.code == 2
    assert "set model.logit_scale=false" in refused.message


@pytest.mark.long
def test_batches_of_one_source_and_similar_lengths_are_in_the_ledger(
    folder: Path, dataset_folder: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Over several passes; each batch of 12 rows is from one of two datasets."""
    (tmp_path / "more").mkdir()
    source = {"kind": "retrieval", "paths": [str(folder / "dev.jsonl")]}
    more = tasks.build_rows(tmp_path / "more", source, dataset_folder / "tokenizer")
    file, run = folder / "retriever.yaml", tmp_path / "run"
    first = yaml.safe_load(file.read_text())["data"]["path"]
    sources = json.dumps([{"path": first, "weight": 2}, {"path": str(more), "name": "more"}])
    settings = (
        f"data.sources={sources}",
        "data.group_by_source=12",
        "data.group_by_length=12",
        "data.lanes=4",
        "training.steps=160",
        "training.evaluate_every=null",
        "objective.known_positives=2",
    )
    assert samestep("train", file, f"output={run}", *settings).code == 0
    assert samestep("ledger", "verify", run).code == 0
