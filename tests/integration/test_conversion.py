"""`samestep checkpoint convert`, with a DeepSpeed that knows nothing of us on the other side."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from samestep.errors import CheckpointError
from tests.integration.commands import Samestep, losses
from tests.outputs import predict
from trainer.checkpoint import Checkpointer, Config, deepspeed
from trainer.models.codecs import codec_of
from trainer.models.families import bert
from trainer.optim import groups
from trainer.optim.kinds import adamw
from trainer.publish.step_zero import StepZero
from trainer.training.weights.loading import load_weights

SAVED, STEPS = 3, 6
SETTINGS = [
    "data.sequence_length=30",
    "model.width=30",
    "model.ffn_width=62",
    "model.max_positions=31",
    "model.dropout=0",
    "training.steps=5",
    "data.threads=0",
]
NONE = {"dropout": 0.0, "attention_dropout": 0.0}
MODEL = bert.Config(
    vocab_size=600, layers=2, width=30, heads=2, ffn_width=62, max_positions=31, **NONE
)
ADAMW = adamw.Config(lr=1e-3)


@dataclass(frozen=True)
class Plain:
    """The script of DeepSpeed, which waits after its first part: see `plain_deepspeed.py`."""

    folder: Path
    process: subprocess.Popen[str]

    def losses(self, name: str) -> list[float]:
        found: list[float] = json.loads((self.folder / f"{name}.json").read_text())
        return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plain]:
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed")
    folder = tmp_path_factory.mktemp("deepspeed")
    script = Path(__file__).with_name("plain_deepspeed.py")
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, str(script), str(folder)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line == "written\n":
                break
        else:
            raise AssertionError("".join(said))
        yield Plain(folder, process)
        process.kill()


def batch(step: int) -> Tensor:
    """That of the script."""
    return torch.randint(600, (12, 16), generator=torch.Generator().manual_seed(step))


def train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_of: Callable[[Tensor], Tensor],
    steps: range,
) -> list[float]:
    found = []
    for step in steps:
        loss = loss_of(batch(step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.fixture(scope="module")
def reference() -> dict[str, dict[str, Tensor]]:
    """Weights and moments of our names after the steps before the checkpoint.

    Transformers and torch in one process.
    """
    import transformers

    torch.manual_seed(1)
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = {
        key: value
        for key, value in codec_of(MODEL).to_huggingface().items()
        if key not in ("architectures", "model_type")
    }
    model = transformers.BertForMaskedLM(transformers.BertConfig(**{**config, **none}))
    optimizer = torch.optim.AdamW(
        groups.parameter_groups(model.named_parameters(), 0.01), lr=1e-3, eps=1e-6
    )
    train(model, optimizer, lambda rows: model(input_ids=rows, labels=rows).loss, range(SAVED))
    named = dict(model.named_parameters())
    state = {"fp32": {name: value.detach() for name, value in named.items()}}
    for kind in deepspeed.MOMENTS:
        state[kind] = {name: optimizer.state[value][kind] for name, value in named.items()}
    return {kind: codec_of(MODEL).import_tensors(tensors) for kind, tensors in state.items()}


def continued(checkpoints: Path) -> list[float]:
    """The losses of our model and optimizer, restored from a checkpoint, on the batches that the
    script had next.
    """
    model = MODEL.build()
    optimizer = ADAMW.build(model.named_parameters())
    groups.prime(optimizer)
    tensors: dict[str, Tensor] = {
        f"model/{name}": value.detach() for name, value in model.named_parameters()
    }
    moments = groups.state_tensors(optimizer, dict(model.named_parameters()).items())
    tensors |= {f"optimizer/{name}": value for name, value in moments.items()}
    step = Checkpointer(checkpoints, Config(), rank=0, world_size=1).restore(tensors)["step"]
    groups.set_step(optimizer, step)
    groups.set_lr(optimizer, 1e-3)

    def loss(rows: Tensor) -> Tensor:
        places = torch.arange(rows.shape[1]).expand(len(rows), -1)
        logits = predict(
            model, tokens=rows, segments=torch.ones_like(rows), positions=places, predicted=places
        )
        return F.cross_entropy(logits.flatten(0, 1), rows.flatten())

    return train(model, optimizer, loss, range(step, STEPS))


@pytest.mark.long
@pytest.mark.parametrize("name", ["1", "2", "3", "universal-1", "universal-3"])
def test_a_plain_deepspeed_run_is_taken_over(
    plain: Plain,
    reference: dict[str, dict[str, Tensor]],
    name: str,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    result = samestep(
        "checkpoint",
        "convert",
        plain.folder / name,
        experiment_file,
        f"output={tmp_path}",
        *SETTINGS,
    )
    assert result.code == 0, result.err
    weights = load_weights(tmp_path)
    assert weights.step == SAVED
    found = {f"fp32/{name}": weights.tensors[name] for name in weights.tensors} | dict(
        weights.optimizer
    )
    expected = {
        f"{kind}/{name}": tensor
        for kind, tensors in reference.items()
        for name, tensor in tensors.items()
    }
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert (found[key] - tensor).norm() <= 1e-4 * tensor.norm(), key
    following = plain.losses(name.removeprefix("universal-"))
    assert continued(tmp_path / "checkpoints") == pytest.approx(following, rel=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_masters_of_a_bf16_run_are_taken_over(
    plain: Plain, reference: dict[str, dict[str, Tensor]], stage: int
) -> None:
    """They are in fp32, and what they were trained to differs by the rounding of passes from what
    fp32 gives.
    """
    folder = deepspeed.step_folder(plain.folder / f"bf16-{stage}")
    assert folder is not None
    assert next(folder.glob("bf16_zero_pp_rank_1_*")).is_file()
    state = deepspeed.open_checkpoint(folder)
    assert state.step == SAVED
    for kind, tensors in state.tensors.items():
        found = codec_of(MODEL).import_tensors(dict(tensors))
        assert found.keys() == reference[kind].keys()
        for name, tensor in reference[kind].items():
            assert found[name].dtype == torch.float32
            assert (found[name] - tensor).norm() <= 0.4 * tensor.norm(), (kind, name)


@pytest.mark.long
def test_the_run_goes_on_from_it_and_its_ledger_begins_there(
    plain: Plain, samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    settings = [f"output={tmp_path}", *SETTINGS, "data.exclude=[[0, 36]]"]
    assert (
        samestep("checkpoint", "convert", plain.folder / "3", experiment_file, *settings).code == 0
    )
    assert samestep("evaluate", tmp_path, "accelerator=cpu").code == 0
    with pytest.raises(CheckpointError, match="the run was imported from DeepSpeed"):
        StepZero.of(tmp_path / "checkpoints" / "step-00000003")
    trained = samestep("train", experiment_file, *settings)
    assert trained.code == 0, trained.err
    assert "continuing   at step 3\n" in trained.err, "no setting has changed"
    assert list(losses(tmp_path)) == [4, 5]
    rows = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [row["kind"] for row in rows] == ["taken", "order", "excluded", "fed", "fed"]
    assert rows[3]["examples"] == [[36, 46]]
    verified = samestep("ledger", "verify", tmp_path)
    assert verified.code == 0, verified.out
    assert (
        "after 3 steps of another program, of which the ledger says nothing, 2 steps consumed 20 "
        "examples" in verified.out
    )


@pytest.mark.long
def test_a_run_is_handed_over_to_deepspeed(
    plain: Plain, samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    """Under all stages, and on three processes instead of two."""
    run, back = tmp_path / "run", plain.folder / "back"
    assert (
        samestep(
            "checkpoint", "convert", plain.folder / "2", experiment_file, f"output={run}", *SETTINGS
        ).code
        == 0
    )
    assert samestep("checkpoint", "convert", run, back).code == 0
    said, _ = plain.process.communicate("\n")
    assert plain.process.returncode == 0, said
    for stage in "123":
        assert plain.losses(f"back-{stage}") == pytest.approx(plain.losses(stage), rel=1e-5)
    assert "already exists" in samestep("checkpoint", "convert", run, back).message


@pytest.mark.long
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda folder: (folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink(),
            "optimizer states of rank 1",
        ),
        (
            lambda folder: (folder / "mp_rank_00_model_states.pt").unlink(),
            "has no mp_rank_00_model_states.pt",
        ),
        (
            lambda folder: [path.unlink() for path in folder.glob("zero_*")],
            "it was saved without ZeRO",
        ),
        (
            lambda folder: os.truncate(folder / "zero_pp_rank_1_mp_rank_00_optim_states.pt", 999),
            "cannot read",
        ),
        (
            lambda folder: change(folder, 1, lambda state: state["state"][0]["step"].fill_(2)),
            "of the steps 2, 3",
        ),
        (
            lambda folder: change(folder, 0, lambda state: state["state"][0].pop("exp_avg_sq")),
            "keeps exp_avg, and only",
        ),
        (
            lambda folder: change(folder, 0, lambda state: state["state"].clear()),
            "has made no update",
        ),
    ],
)
def test_what_cannot_be_taken_over_is_refused(
    plain: Plain,
    damage: Callable[[Path], object],
    message: str,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    shutil.copytree(plain.folder / "1", tmp_path / "1")
    damage(tmp_path / "1" / "global_step3")
    result = samestep(
        "checkpoint",
        "convert",
        tmp_path / "1",
        experiment_file,
        f"output={tmp_path / 'run'}",
        *SETTINGS,
    )
    assert result.code == 1
    assert message in result.message
    assert not (tmp_path / "run").exists()


def change(folder: Path, rank: int, how: Callable[[dict[str, Any]], object]) -> None:
    """Changes the optimizer's state in the file of a rank."""
    path = folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
    content = torch.load(path, weights_only=False)
    how(content["optimizer_state_dict"]["base_optimizer_state"])
    torch.save(content, path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["model.layers=3"], "is missing"),
        (["model.width=32", "model.ffn_width=64"], "instead of"),
        (["optimizer={kind: adafactor}"], "optimizer adafactor has other state"),
        (["training.steps=3", "schedule.warmup_steps=0"], "set training.steps above 3"),
    ],
)
def test_an_experiment_that_does_not_fit_is_refused(
    plain: Plain,
    settings: list[str],
    message: str,
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
) -> None:
    settings = [f"output={tmp_path / 'run'}", *SETTINGS, *settings]
    assert (
        message
        in samestep("checkpoint", "convert", plain.folder / "1", experiment_file, *settings).message
    )
    assert not (tmp_path / "run").exists()


def test_sources_and_targets_that_do_not_go_together_are_refused(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    def message(source: Path, *arguments: object) -> str:
        return samestep("checkpoint", "convert", source, *arguments).message

    empty, theirs, adafactor, target = (
        tmp_path / name for name in ("empty", "theirs", "adafactor", "target")
    )
    empty.mkdir()
    assert "is not a checkpoint of DeepSpeed" in message(empty, experiment_file)
    assert "is neither a run" in message(empty, target)
    assert "is not an experiment" in message(empty, target, "seed=1")
    assert "name a folder" in message(empty, "s3://bucket/folder")
    recipe = ("recipes/pretrain/bert_base", f"output={target}")
    assert "is not a checkpoint of DeepSpeed" in message(empty, *recipe)
    theirs.mkdir()
    (theirs / "latest").write_text("global_step3")
    assert "name the experiment" in message(theirs, target)
    assert "no partitions of ZeRO" in message(theirs, experiment_file)
    checkpointer = Checkpointer(adafactor / "checkpoints", Config(), rank=0, world_size=1)
    parameters = dict(MODEL.build().named_parameters())
    tensors = {f"model/{name}": each.detach() for name, each in parameters.items()}
    tensors["optimizer/mean_square/head.bias"] = torch.ones(600)
    checkpointer.save(
        1,
        tensors,
        {
            "config": {
                **{key: {} for key in ("data", "objective", "training")},
                "output": str(adafactor),
                "model": {"kind": "bert", **asdict(MODEL)},
            }
        },
    )
    checkpointer.wait()
    assert "of an optimizer that keeps mean_square" in message(adafactor, target)
    assert not target.exists()
