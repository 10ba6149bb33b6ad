"""What is done with the checkpoints of real runs.

They are scored, opened by several ranks together, exported.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import pytest
import torch

from data_pipeline.reading.packed_split import PackedSplit
from samestep.cli import main
from samestep.config import load
from samestep.errors import CheckpointError, StorageError
from samestep.storage import objects
from tests.integration.commands import Samestep, losses
from tests.processes import run_ranks
from trainer.checkpoint import files
from trainer.elastic import agent
from trainer.strategies.world import World
from trainer.training.compose import open_checkpointer
from trainer.training.experiment import Experiment
from trainer.training.weights.loading import Weights, load_weights

HYBRID = "strategy={kind: fsdp, replicas: 2}"
ROBERTA = "{kind: roberta, vocab_size: 600, layers: 1, width: 32, heads: 2, ffn_width: 64, max_positions: 32}"  # noqa: E501


def test_one_process_scores_what_two_trained(
    samestep: Samestep, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a run that only several processes could train.

    The training documents are not even looked at.
    """
    opened, init = [], PackedSplit.__init__

    def record(self: PackedSplit, dataset: object, split: str, *arguments: object) -> None:
        opened.append(split)
        init(self, dataset, split, *arguments)

    monkeypatch.setattr(PackedSplit, "__init__", record)
    result = samestep("evaluate", finished_run, HYBRID)
    assert result.code == 0, result.err
    assert result.out.split()[:3:2] == ["step", "loss"]
    assert set(opened) == {"heldout"}


@pytest.mark.long
def test_two_processes_score_as_one_and_print_once(
    samestep: Samestep, finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = samestep("evaluate", finished_run).out.split()
    asked: list[tuple[object, list[str], int]] = []
    monkeypatch.setattr(agent, "run_workers", lambda *arguments: asked.append(arguments) or 0)
    assert samestep("evaluate", finished_run, "--processes", "2", HYBRID, "--step", "12").code == 0
    ((_, arguments, processes),) = asked
    together, silence = (output.split() for output in run_ranks(processes, output_of, arguments))
    assert not silence
    assert together[::2] == alone[::2] == ["step", "loss", "accuracy", "perplexity"]
    assert [float(x) for x in together[1::2]] == pytest.approx(
        [float(x) for x in alone[1::2]], rel=1e-5
    )


def output_of(arguments: list[str]) -> str:
    """What a command prints in one rank."""
    with contextlib.redirect_stdout(io.StringIO()) as output:
        assert main(arguments) == 0
    return output.getvalue()


def test_ranks_share_the_verification(finished_run: Path) -> None:
    """The file of the tensors is read through once, and each rank has all of them."""
    ranks = run_ranks(2, open_weights, str(finished_run))
    verified = [name for names, _ in ranks for name in names]
    assert sorted(verified) == ["meta.json", "rank-00000.safetensors"]
    assert ranks[0][1] == ranks[1][1] == total(load_weights(finished_run))


def open_weights(run: str) -> tuple[list[str], float]:
    """What one rank reads through, and what it finds."""
    verified, digest = [], files.digest
    files.digest = lambda path: (verified.append(path.name), digest(path))[1]
    world = World.start(60)
    world.connect("gloo")
    weights = load_weights(run, world.rank, world.size)
    world.close()
    return verified, total(weights)


def test_a_rank_that_cannot_look_for_weights_is_everybody_s_failure() -> None:
    assert run_ranks(2, open_out_of_reach) == ["rank 1 has no network"] * 2


def open_out_of_reach() -> str:
    """What one rank hears when rank 1 does not reach the store of the weights."""
    world = World.start(60)
    world.connect("gloo")

    def exists(url: str) -> bool:
        if world.rank == 1:
            raise StorageError("rank 1 has no network")
        return True

    objects.exists = exists
    with pytest.raises(CheckpointError) as caught:
        load_weights("s3://bucket/run/step-00000001", world.rank, world.size)
    return str(caught.value)


def total(weights: Weights) -> float:
    """The sum of all parameters."""
    return sum(float(tensor.double().sum()) for tensor in weights.tensors.values())


def test_patience_with_a_silent_rank_ends_before_that_of_collectives(
    experiment_file: str, tmp_path: Path
) -> None:
    """So that the rank is named; the time-out of a collective names nobody."""
    overrides = [f"output={tmp_path / 'run'}", "training.collective_timeout=4"]
    messages = run_ranks(2, save_without_rank_1, experiment_file, overrides)
    assert all("no files from ranks [1]" in message for message in messages)


def save_without_rank_1(file: str, overrides: list[str]) -> str:
    """What one rank hears when rank 1 never writes its part of a checkpoint."""
    experiment = load(Experiment, file, overrides)
    world = World.start(60)
    world.connect("gloo")
    checkpointer = open_checkpointer(experiment, world)
    assert checkpointer._peer_timeout < experiment.training.collective_timeout
    if world.rank == 1:
        checkpointer._write = lambda *_: None
    checkpointer.save(1, {"model/weight": torch.ones(3)}, {})
    with pytest.raises(CheckpointError) as caught:
        checkpointer.wait()
    return str(caught.value)


def test_a_run_goes_on_while_saves_fail_but_does_not_end_well_without_its_last(
    samestep: Samestep, experiment_file: str, tmp_path: Path, small_disk: Path
) -> None:
    run = [
        f"output={tmp_path / 'run'}",
        f"checkpoint.folder={small_disk / 'run'}",
        "checkpoint.every=4",
    ]
    result = samestep("train", experiment_file, *run)
    assert result.code == 1
    assert "saving step-00000004 failed: cannot write" in result.err
    assert (
        "training continues, and the next save tries again (3 saves in a row have failed)"
        in result.err
    )
    assert "saving step-00000012 failed" in result.message
    assert "No space left on device" in result.message
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
    left = [path for path in (small_disk / "run").glob("step-*/*") if path.name != "LEASE"]
    assert not left


def test_padding_that_would_shift_positions_is_refused(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    """transformers counts RoBERTa's positions from the padding's id, and WordPiece has its padding
    at 0.
    """
    run = tmp_path / "run"
    overrides = [f"output={run}", f"model={ROBERTA}", "training.steps=4"]
    assert samestep("train", experiment_file, *overrides).code == 0
    result = samestep("export", run, tmp_path / "exported")
    assert result.code == 2
    assert "padding token at id 0" in result.message
    assert "needs it at 1" in result.message
    assert not (tmp_path / "exported").exists()
