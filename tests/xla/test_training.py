"""Runs under torch-xla's SPMD, on 4 devices, beside the same runs of one process of torch on the
CPU.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from samestep.config import read_tree
from samestep.errors import EXIT_PREEMPTED
from tests.backend_files import TPU, small
from tests.integration.commands import Samestep, losses
from tests.xla.conftest import PYTHON, XLA, Work, Xla, environment, reports

RELATIVE = 1e-4
SAVED, STEPS = 5, 35
PACKED = (
    "data.packing=concat",
    "model={kind: roberta, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32,"
    " attention_dropout: 0.0}",
)
ALBERT = (
    "model={kind: albert, vocab_size: 600, layers: 4, groups: 2, width: 32, embedding_width: 16, "
    "heads: 2, ffn_width: 64, max_positions: 32, dropout: 0.1}",
)
ELECTRA = (
    "objective=replaced_tokens",
    "model={kind: electra, vocab_size: 600, layers: 3, width: 32, embedding_width: 16, heads: 2, "
    "ffn_width: 64, max_positions: 32, attention_dropout: 0.0, generator_divisor: 2}",
)
MODERNBERT = (
    "model={kind: modernbert, vocab_size: 600, layers: 5, width: 32, heads: 2, ffn_width: 48, "
    "max_positions: 32, local_window: 8}",
)
MPNET = (
    "model={kind: mpnet, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32}",
)
NEOBERT = (
    "model={kind: neobert, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 48, "
    "max_positions: 32}",
)
LLAMA = (
    "objective=causal_lm",
    "model={kind: llama, vocab_size: 700, layers: 3, width: 32, heads: 4, kv_heads: 2, "
    "head_width: 8, ffn_width: 48, max_positions: 64}",
)
XLNET = (
    "objective=permutation_lm",
    "model={kind: xlnet, vocab_size: 600, layers: 3, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32}",
)
DEBERTA = (
    "model={kind: deberta_v2, vocab_size: 600, layers: 4, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32, position_buckets: 8, conv_width: 3, mask_decoder: true}",
)
DEBERTA_V3 = (
    "objective=replaced_tokens",
    "model={kind: deberta_v3, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 32, position_buckets: 8, generator_layers: 1}",
)
DECODER = (
    "objective=causal_lm",
    "model={kind: gpt2, vocab_size: 700, layers: 3, width: 32, heads: 2, ffn_width: 64, "
    "max_positions: 64,"
    " attention_dropout: 0.0}",
)


def on_cpu(samestep: Samestep, file: str, folder: Path, *overrides: str) -> list[float]:
    """The run of one process, with a checkpoint of step 5."""
    common = (f"output={folder}", "strategy=single", "checkpoint={every: 5, keep_last: 99}")
    assert samestep("train", file, *common, *overrides).code == 0
    return list(losses(folder).values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "kind",
    [
        *("bert", "electra", "modernbert", "t5", "gpt2"),
        *(
            pytest.param(kind, marks=pytest.mark.exhaustive)
            for kind in (
                *("packed roberta", "albert", "mpnet", "neobert", "llama"),
                *("deberta", "deberta v3", "xlnet"),
            )
        ),
    ],
)
def test_losses_are_those_of_the_cpu(
    work: Work,
    samestep: Samestep,
    experiment_file: str,
    t5_experiment: str,
    tmp_path: Path,
    kind: str,
) -> None:
    """From a checkpoint of the CPU on.

    Two micro-batches a step, evaluations whose last batch is not full, saves.

    Everything is compiled once: the update that makes the optimizer's state, what the checkpoint
    gives, the step, the reading of metrics, and the evaluation. Nothing falls back to the CPU.
    """
    file = t5_experiment if kind in ("t5", "gpt2", "llama") else experiment_file
    models = {
        "packed roberta": PACKED,
        "albert": ALBERT,
        "electra": ELECTRA,
        "modernbert": MODERNBERT,
        "mpnet": MPNET,
        "neobert": NEOBERT,
        "llama": LLAMA,
        "xlnet": XLNET,
        "deberta": DEBERTA,
        "deberta v3": DEBERTA_V3,
        "gpt2": DECODER,
    }
    model = models.get(kind, ("model.layers=3",))
    settings = (
        *model,
        f"training.steps={STEPS}",
        "training.evaluate_every=15",
        "training.micro_batch_size=2",
    )
    expected = on_cpu(samestep, file, tmp_path / "cpu", *settings)
    shutil.copytree(tmp_path / "cpu", tmp_path / "xla")
    for folder in (tmp_path / "xla" / "checkpoints").glob("step-*"):
        if folder.name != f"step-{SAVED:08d}":
            shutil.rmtree(folder)
    report = work(
        file,
        f"output={tmp_path / 'xla'}",
        *settings,
        "checkpoint={every: 10, keep_last: 99}",
        resume=SAVED,
    )
    np.testing.assert_allclose(report["losses"], expected[SAVED:], rtol=RELATIVE)
    assert report["compilations"] == {
        "start": 1,
        "restore": 1,
        "step": 1,
        "metrics": 1,
        "evaluation": 1,
        "metrics of evaluation": 0,  # the same graph as that of training
    }
    assert report["compiled"] == 5
    assert report["fallbacks"] == []
    names = (
        "model/embeddings.tokens.weight",
        next(n for n in report["splits"] if n.endswith("ffn.up.weight")),
    )
    if (
        file == experiment_file
    ):  # the other one trains with Adafactor, whose means are whole on all devices
        names += (
            next(
                n
                for n in report["splits"]
                if n.startswith("optimizer/exp_avg/") and "ffn.down" in n
            ),
        )
    for name in names:
        print(
            f"{kind}: {name} is split as {report['splits'][name]}, {report['shards'][name]} on "
            "each device"
        )
        # Layers of a loop are stacked; ALBERT's, which are shared, do not run as one.
        stacked = kind != "albert" and ("layers.0" in name or ".0." in name)
        layers = "1," if stacked else ""
        assert report["splits"][name] == f"{{devices=[{layers}4,1]0,1,2,3}}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "optimizer",
    [
        "{kind: lamb, lr: 1e-2}",
        pytest.param("{kind: muon, lr: 3e-3}", marks=pytest.mark.exhaustive),
    ],
)
def test_updates_of_whole_matrices_in_two_phases(
    work: Work, samestep: Samestep, experiment_file: str, tmp_path: Path, optimizer: str
) -> None:
    """Each phase has shapes of its own, and so a step and an evaluation of its own."""
    settings = (
        "model.layers=3",
        f"optimizer={optimizer}",
        "phases=[{steps: 6, sequence_length: 16, global_batch_size: 16}, {steps: 6, "
        "sequence_length: 32}]",
        "training.evaluate_every=6",
    )
    expected = on_cpu(samestep, experiment_file, tmp_path / "cpu", *settings)
    report = work(experiment_file, f"output={tmp_path / 'xla'}", *settings)
    np.testing.assert_allclose(report["losses"], expected, rtol=RELATIVE)
    phases = {f"{name} of phase {phase}": 1 for name in ("step", "evaluation") for phase in (0, 1)}
    metrics = {f"metrics of evaluation of phase {phase}": 0 for phase in (0, 1)}
    assert report["compilations"] == {"start": 1, "metrics": 1, **phases, **metrics}


@pytest.mark.timeout(600)
def test_from_fsdp_to_xla_to_ddp(
    xla: Xla, samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    """A run goes on under XLA with what 3 processes of FSDP2 left, and 2 of DDP go on with what XLA
    left.
    """
    schedule = "schedule={warmup_steps: 4, decay: constant}"
    expected = on_cpu(samestep, experiment_file, tmp_path / "whole", schedule, "training.steps=30")
    common = (experiment_file, f"output={tmp_path / 'run'}", schedule, "model.layers=2")
    common += ("checkpoint.keep_last=9",)
    assert (
        samestep("train", *common, "training.steps=10", "strategy=fsdp", "--processes", 3).code == 0
    )
    done = xla("samestep.cli", "train", *common, "training.steps=20", *XLA)
    assert done.returncode == 0, done.stderr[-4000:]
    assert (
        samestep("train", *common, "training.steps=30", "strategy=ddp", "--processes", 2).code == 0
    )
    np.testing.assert_allclose(list(losses(tmp_path / "run").values()), expected, rtol=RELATIVE)
    printed = [
        samestep(
            "evaluate", tmp_path / "run", "--step", 20, "strategy=single", "accelerator=cpu"
        ).out,
        xla("samestep.cli", "evaluate", tmp_path / "run", "--step", 20, *XLA).stdout,
    ]
    theirs, ours = (
        {line.split()[0]: float(line.split()[1]) for line in each.splitlines()[-4:]}
        for each in printed
    )
    assert ours == pytest.approx(theirs, rel=RELATIVE)
    assert {"loss", "accuracy", "perplexity"} <= theirs.keys()
    verified = samestep("ledger", "verify", tmp_path / "run")
    assert verified.code == 0, verified.err
    assert "30 steps" in verified.out + verified.err


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            ("strategy={kind: xla_spmd, scan_layers: false}",), marks=pytest.mark.exhaustive
        ),
        ("training.activation_checkpointing=true",),
        (
            "strategy={kind: xla_spmd, replicas: 2}",
            "training.faults.action=skip",
            "training.micro_batch_size=1",
        ),
    ],
    ids=["written out", "checkpointing", "replicas, and each step looked at"],
)
def test_options_change_no_loss(
    work: Work, samestep: Samestep, experiment_file: str, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    common = ("model.layers=3", "training.steps=8")
    expected = on_cpu(samestep, experiment_file, tmp_path / "cpu", *common)
    report = work(experiment_file, f"output={tmp_path / 'xla'}", *common, *settings)
    np.testing.assert_allclose(report["losses"], expected, rtol=RELATIVE)
    assert set(report["compilations"].values()) == {1}


@pytest.mark.timeout(600)
def test_asked_to_stop_on_one_device_it_goes_on_on_four(
    xla: Xla, samestep: Samestep, t5_experiment: str, tmp_path: Path
) -> None:
    """As before a pre-emption; encoder and decoder have the same layers, and Adafactor means of
    rows and columns.
    """
    common = ("model.architecture=shared_encoder_decoder", "training.steps=60")
    expected = on_cpu(samestep, t5_experiment, tmp_path / "cpu", *common)
    command = ("train", t5_experiment, f"output={tmp_path / 'run'}", *common, *XLA)
    with subprocess.Popen(
        [PYTHON, "-m", "samestep.cli", *command], env=environment(CPU_NUM_DEVICES="1")
    ) as process:
        while not losses(tmp_path / "run"):
            assert process.poll() is None
            time.sleep(0.1)
        process.terminate()
    assert process.returncode == EXIT_PREEMPTED
    done = xla("samestep.cli", *command, "strategy.replicas=2")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "step 60" in done.stderr
    np.testing.assert_allclose(list(losses(tmp_path / "run").values()), expected, rtol=RELATIVE)
    assert samestep("ledger", "verify", tmp_path / "run").code == 0


@pytest.mark.timeout(600)
def test_the_host_waits_for_the_devices_to_log_only(
    work: Work, experiment_file: str, tmp_path: Path
) -> None:
    """In 100 steps with 10 rows of metrics.

    Each reads the sums of metrics, and the norm of the gradient.
    """
    settings = (
        "training.steps=110",
        "training.log_every=10",
        "training.precision=bf16",
        "model.layers=3",
    )
    report = work(experiment_file, f"output={tmp_path}", *settings)
    assert report["transfers"][-1] - report["transfers"][0] == 2 * 10
    assert report["losses"][-1] < report["losses"][0]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            "shape",
            r"step is not the graph that was compiled: .*\[12,3\].*, where it had .* \(changing_objective.py, line",  # noqa: E501
        ),
        (
            "number",
            r"graph that was compiled: aten::mul, .*with another number in it \(changing_objective.py, line",  # noqa: E501
        ),
    ],
)
def test_a_graph_that_changes_ends_the_run(
    xla: Xla, experiment_file: str, tmp_path: Path, changes: str, said: str
) -> None:
    objective = f"objective={{kind: tests.xla.changing_objective, changes: {changes}}}"
    done = xla("samestep.cli", "train", experiment_file, f"output={tmp_path}", *XLA, objective)
    assert done.returncode == 1
    assert re.search(said, " ".join(done.stderr.split())), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("settings", "changes", "said"),
    [
        (
            ("strategy={kind: xla_spmd, replicas: 3}",),
            {},
            "replicas 3 does not divide the 4 devices. Use one of [1, 2, 4]",
        ),
        (
            ("training.global_batch_size=3",),
            {},
            "global_batch_size 3 is less than the 4 data-parallel devices",
        ),
        (
            ("strategy={kind: deepspeed, stage: 1}",),
            {},
            "strategy deepspeed does not fit XLA on 4 CPU devices. Use strategy=xla_spmd",
        ),
        (
            ("strategy=fsdp",),
            {},
            "strategy fsdp does not fit XLA on 4 CPU devices. Use strategy=xla_spmd",
        ),
        (
            ("accelerator=cpu",),
            {},
            "strategy xla_spmd does not fit CPU, 1 thread. Use strategy=fsdp, or accelerator=xla",
        ),
        (("training.precision=fp16",), {}, "Use bf16 or fp32"),
        (("training.compile=true",), {}, "XLA compiles every step. Set it to false"),
        ((), {"PJRT_DEVICE": "TPU"}, "accelerator: xla finds no TPU device"),
    ],
)
def test_what_does_not_fit_is_refused(
    xla: Xla,
    experiment_file: str,
    tmp_path: Path,
    settings: tuple[str, ...],
    changes: dict[str, str],
    said: str,
) -> None:
    done = xla(
        "samestep.cli", "train", experiment_file, f"output={tmp_path}", *XLA, *settings, **changes
    )
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert said in " ".join(done.stderr.split()), done.stderr


@pytest.mark.parametrize("file", TPU, ids=lambda file: file.stem)
def test_the_experiments_of_tpus_start(
    xla: Xla, file: Path, dataset_folder: Path, t5_experiment: str, tmp_path: Path
) -> None:
    sentinels = read_tree(t5_experiment)["data"]["path"]
    settings = small(file, str(dataset_folder), sentinels)
    done = xla("samestep.cli", "train", file, f"output={tmp_path / 'run'}", *settings)
    assert done.returncode == 0, done.stderr[-4000:]
    assert len(losses(tmp_path / "run")) == 2


def test_selected_positions_are_a_product_unless_they_are_many(xla: Xla) -> None:
    """torch-xla would gather each number by itself, and sort all of them for the gradient.

    The product is exact under autocast, and with two positions that are the same. The 0/1 matrix
    may not be larger than the hidden states.
    """
    sizes = [[5, 32, 8], [8, 32, 8], [9, 32, 8]]  # positions, length, width
    done = xla("tests.xla.taken_positions", json.dumps(sizes))
    assert done.returncode == 0, done.stderr[-4000:]
    found = reports(done.stdout)
    assert [each["operations"] for each in found[:2]] == [["dot"]] * 2
    assert "gather" in found[2]["operations"]
    assert "dot" not in found[2]["operations"]
    for taken, gradient in (each["errors"] for each in found):
        assert taken == 0
        assert gradient < 1e-6
