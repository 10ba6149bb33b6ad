"""`samestep doctor` tries out the devices that XLA drives."""

from __future__ import annotations

import re

from tests.xla.conftest import XLA, Xla


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_healthy_machine(xla: Xla) -> None:
    done = xla("samestep.cli", "doctor", COLUMNS="200")
    said = words(done.stdout)
    assert done.returncode == 0, said
    assert re.search(r"ok software samestep \S+ torch 2\.9\S+ .*, torch-xla 2\.9", said)
    assert "ok devices XLA on 4 CPU devices" in said
    assert "ok topology 1 machine, 4 devices; mesh 1 (replicate) x 4 (shard)" in said
    assert re.search(r"ok products right results, \S+ TFLOP/s in fp32 on each device", said)
    assert re.search(r"ok all-reduce 4 devices by XLA: \S+ GB/s ok", said)


def test_a_device_that_computes_wrongly_is_named(xla: Xla) -> None:
    done = xla("tests.xla.sick_device", COLUMNS="200")
    said = words(done.stdout)
    assert done.returncode == 1
    assert "failed products wrong on CPU:2 → take this machine out of use" in said
    assert re.search(r"failed all-reduce 4 devices by XLA: \S+ GB/s, and a wrong result", said)


def test_a_strategy_that_does_not_fit_is_found_before_the_run(
    xla: Xla, experiment_file: str
) -> None:
    done = xla(
        "samestep.cli", "doctor", experiment_file, "accelerator=xla", "strategy=fsdp", COLUMNS="200"
    )
    assert done.returncode == 1
    assert "failed topology 1 machine, 4 devices; the strategy is for other devices" in words(
        done.stdout
    )
    done = xla(
        "samestep.cli", "doctor", experiment_file, *XLA, "strategy.replicas=3", COLUMNS="200"
    )
    assert done.returncode == 1
    assert (
        "failed topology strategy.replicas=3 on 1 machine, 4 devices → use a divisor of 4"
        in words(done.stdout)
    )


def test_no_chip_is_a_failure_and_no_crash(xla: Xla, experiment_file: str) -> None:
    done = xla("samestep.cli", "doctor", experiment_file, *XLA, COLUMNS="200", PJRT_DEVICE="TPU")
    assert done.returncode == 1
    assert re.search("failed devices .*(TPU|libtpu)", words(done.stdout))
