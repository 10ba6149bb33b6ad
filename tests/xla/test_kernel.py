"""Attention by the Pallas kernel of TPUs, which XLA's CPU back-end can only interpret."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from benchmarks import libtpu
from tests.xla.conftest import PYTHON, XLA, Work, Xla, reports

CALLS = [
    *product([640], [64], [False, True], [False, True]),
    (256, 128, True, True),
    (128, 32, False, True),
]
FORWARD_AND_BACKWARD = [1, 2]  # kernels


@pytest.mark.timeout(600)
def test_it_is_attention(xla: Xla) -> None:
    """Of one block of cells and of five, with and without order and segments, and gradients."""
    done = xla("tests.xla.interpreted_kernel", "errors", json.dumps(CALLS))
    assert done.returncode == 0, done.stderr[-4000:]
    errors, kernels = reports(done.stdout)[: len(CALLS)], reports(done.stdout)[len(CALLS) :]
    assert max(each["error"] for each in errors) < 0.01  # of 8 bits
    assert [each["kernels"] for each in kernels] == [FORWARD_AND_BACKWARD] * (len(CALLS) + 2)


@pytest.mark.timeout(600)
def test_the_compiler_of_tpus_takes_it(xla: Xla) -> None:
    """Of the version that TPU images pin; a newer JAX may write what it cannot read."""
    variables = libtpu.variables(str(PYTHON), "v5e:2x2")
    done = xla("tests.xla.tpu_compiler", json.dumps(CALLS), **variables)
    assert done.returncode == 0, done.stderr[-4000:]
    kernels = [[["tpu_custom_call"], ["tpu_custom_call"] * 2]]
    assert [each["calls"] for each in reports(done.stdout)] == kernels * len(CALLS)


@pytest.mark.timeout(600)
def test_the_doctor_tries_it_out(xla: Xla) -> None:
    done = xla("tests.xla.interpreted_kernel", "doctor", COLUMNS="200")
    (line,) = (line for line in done.stdout.splitlines() if "attention" in line)
    assert line.split()[:2] == ["ok", "attention"]
    assert "by JAX's kernel" in line


@pytest.mark.timeout(600)
@pytest.mark.parametrize("recomputed", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_a_run_with_it(
    xla: Xla, work: Work, experiment_file: str, tmp_path: Path, recomputed: bool
) -> None:
    """In the loop of layers, outside of it, and in an evaluation.

    Compared with attention written out.
    """
    settings = (
        "model={kind: roberta, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 128,"
        " attention_dropout: 0.0}",
        "data={sequence_length: 128, packing: concat}",
        "training={steps: 4, global_batch_size: 8, micro_batch_size: 2, precision: bf16, "
        "evaluate_every: 2}",
        f"training.activation_checkpointing={recomputed}".lower(),
        "strategy.flash_attention_from=128",
    )
    expected = work(experiment_file, f"output={tmp_path / 'out'}", *settings)
    done = xla(
        "tests.xla.interpreted_kernel",
        "run",
        experiment_file,
        "start",
        *XLA,
        *settings,
        f"output={tmp_path}",
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found, *kernels = reports(done.stdout)
    np.testing.assert_allclose(found["losses"], expected["losses"], rtol=2e-3)
    assert found["losses"] != expected["losses"]
    assert found["compilations"] == expected["compilations"]
    assert [each["kernels"] for each in kernels] == [FORWARD_AND_BACKWARD]
