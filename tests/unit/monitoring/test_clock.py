"""Laps by name, on the device's clock."""

from __future__ import annotations

import time

import pytest
import torch

from trainer.accelerators import Accelerator
from trainer.accelerators.kinds.cpu import CpuAccelerator
from trainer.monitoring.clock import Clock


def test_all_time_between_two_readings_has_a_name():
    clock, began = Clock(CpuAccelerator()), time.perf_counter()
    for pause in (0.05, 0.01):
        time.sleep(pause)
        clock.end_section("a")
        time.sleep(0.02)
        clock.end_section("b")
    whole, seconds = time.perf_counter() - began, clock.read().seconds
    assert seconds.keys() == {"a", "b"}
    assert seconds["a"] >= 0.06
    assert sum(seconds.values()) == pytest.approx(whole, abs=0.01)
    assert clock.read() == ({}, [], [])


def test_a_clock_of_events_waits_for_the_device_when_it_is_read_only():
    class Queue(CpuAccelerator):
        """A device whose marks get their times when it reaches them."""

        reached = 0.0

        def mark(self) -> list[float]:
            return []

        def seconds(self, begin: list[float], end: list[float]) -> float:
            for mark in (begin, end):
                if not mark:
                    Queue.reached += 1.0
                    mark.append(Queue.reached)
            return end[0] - begin[0]

    clock = Clock(Queue())
    clock.end_section("a")
    clock.end_section("b")
    assert Queue.reached == 0
    assert clock.read().seconds == {"a": 1.0, "b": 1.0}
    clock.end_section("a")
    assert clock.read().seconds == {"a": 1.0}


def test_steps_end_with_the_optimizer_and_pauses_are_apart():
    class Counting(CpuAccelerator):
        """A device on which each section takes a second longer than the one before."""

        marks = 0

        def mark(self) -> int:
            Counting.marks += 1
            return Counting.marks * Counting.marks

        def seconds(self, begin: int, end: int) -> float:
            return (end - begin - 1) / 2

    clock = Clock(Counting())
    for name in ("data_wait", "forward", "optimizer", "evaluation", "checkpoint", "logging"):
        clock.end_section(name)
    first = clock.read()
    assert first.steps == [1 + 2 + 3]
    assert first.pauses == [("evaluation", 4), ("checkpoint", 5)]
    # The time of logging before the reading belongs to the next step.
    clock.end_section("optimizer")
    assert clock.read() == ({"optimizer": 7}, [6 + 7], [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_work_is_charged_to_the_lap_that_asked_for_it():
    from trainer.accelerators.kinds.cuda import CudaAccelerator

    accelerator: Accelerator = CudaAccelerator(0)
    matrix = torch.ones(8192, 8192, device="cuda")
    matrix @ matrix
    clock = Clock(accelerator)
    for _ in range(20):
        matrix @ matrix
    clock.end_section("work")
    time.sleep(0.005)  # while the device is busy: costs nothing
    clock.end_section("wait")
    seconds = clock.read().seconds
    assert seconds["work"] > 0.01
    assert seconds["wait"] < 0.1 * seconds["work"]
