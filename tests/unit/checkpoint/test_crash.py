"""Whatever moment a process dies at, a committed step with the right content can be restored.

Run as a script, this file forks processes that save until they die; torch is imported once for all
of them.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.checkpoint import Checkpointer, Config

FILE_OPERATIONS = {
    "open",
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.listdir",
    "os.scandir",
}


def open_at(folder: Path) -> Checkpointer:
    return Checkpointer(folder, Config(), rank=0, world_size=1)


def tensors(step: float) -> dict[str, Tensor]:
    return {
        "model/a": torch.full((300, 100), float(step)),
        "model/b": torch.full((3,), -float(step)),
    }


def restored_step(folder: Path) -> int:
    """The newest step; the content of each committed one must be its own."""
    for step in open_at(folder).steps():
        found = tensors(float("nan"))
        open_at(folder).restore(found, step)
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors(step).items()), (
            f"step {step}"
        )
    return open_at(folder).latest() or 0


def forked(work: Callable[[], None]) -> int:
    """Starts a process that does the work and ends without any clean-up; returns its id."""
    process = os.fork()
    if process == 0:
        try:
            work()
        finally:
            os._exit(0)
    return process


def die_before_operation(folder: Path, step: int, number: int) -> bool:
    """Saves a step in a process that dies just before its n-th file operation.

    False if there were fewer.
    """

    def save_and_die() -> None:
        left = number

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal left
            if event in FILE_OPERATIONS and any(
                str(folder) in str(argument) for argument in arguments
            ):
                if left == 0:
                    os._exit(9)
                left -= 1

        fsync = os.fsync
        os.fsync = lambda descriptor: (
            hook("open", (os.readlink(f"/proc/self/fd/{descriptor}"),)),
            fsync(descriptor),
        )[1]
        saver = open_at(folder)
        sys.addaudithook(hook)
        saver.save(step, tensors(step), {})
        saver.wait()

    _, status = os.waitpid(forked(save_and_die), 0)
    return status != 0


def die_at_every_file_operation(folder: Path, _times: int) -> None:
    """For every operation of a save that first cleans up after a crash, and at its end removes an
    old step.
    """
    checkpointer = open_at(folder)
    for step in (1, 2):
        checkpointer.save(step, tensors(step), {})
    checkpointer.wait()
    assert die_before_operation(folder, step=3, number=10)
    assert restored_step(folder) == 2

    found: list[int] = []
    died = True
    while died:
        copy = folder.with_name(f"copy-{len(found)}")
        shutil.copytree(folder, copy)
        died = die_before_operation(copy, step=4, number=len(found))
        found.append(restored_step(copy))
        shutil.rmtree(copy)
    assert found == sorted(found), "the new step is there from one operation on"
    assert found[0] == 2
    assert found[-1] == 4
    assert len(found) > 40, "most operations were seen"


def die_at_random(folder: Path, times: int) -> None:
    """Is killed while saves follow each other; what it said was committed must be there."""
    moments = random.Random(0)
    for _ in range(times):
        reader, writer = os.pipe()

        def save_forever(said: int = writer) -> None:
            saver = open_at(folder)
            step = saver.latest() or 0
            while True:
                step += 1
                saver.save(step, tensors(step), {})
                saver.wait()
                os.write(said, step.to_bytes(8, "little"))

        process = forked(save_forever)
        os.close(writer)
        os.read(reader, 8)  # at least one save is done
        time.sleep(moments.uniform(0, 0.1))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        said = b""
        while more := os.read(reader, 4096):
            said += more
        os.close(reader)
        committed = int.from_bytes(said[-8:], "little")
        assert restored_step(folder) >= committed


@pytest.mark.long
@pytest.mark.parametrize(
    ("scenario", "times"),
    [
        (die_at_every_file_operation, 1),
        pytest.param(die_at_random, 10, marks=pytest.mark.long),
        pytest.param(die_at_random, 200, marks=pytest.mark.chaos),
    ],
)
def test_a_dying_process_leaves_a_whole_checkpoint(
    scenario: Callable[[Path, int], None], times: int, tmp_path: Path
) -> None:
    script = subprocess.run(
        [sys.executable, __file__, scenario.__name__, str(tmp_path / "run"), str(times)],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=220,
    )
    assert script.returncode == 0, script.stderr


if __name__ == "__main__":
    globals()[sys.argv[1]](Path(sys.argv[2]), int(sys.argv[3]))
