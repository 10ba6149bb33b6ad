"""What GPUs are asked for, where there are none: only the calls of CUDA are replaced."""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.accelerators import host_memory, kernels
from trainer.accelerators.kinds import cuda
from trainer.models.layers import embeddings
from trainer.strategies.world import World

RECORDER, KERNELS = "TORCH_NCCL_TRACE_BUFFER_SIZE", "TRITON_CACHE_DIR"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(KERNELS, "unset after the test, too")
    monkeypatch.delenv(KERNELS)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(cuda, "_energy_counter", lambda device: None)
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    yield
    torch.backends.cuda.enable_cudnn_sdp(before)
    torch.use_deterministic_algorithms(False)
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)


@pytest.mark.usefixtures("gpu")
def test_attention_never_uses_cudnn() -> None:
    torch.backends.cuda.enable_cudnn_sdp(True)
    accelerator = cuda.Config().build()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert accelerator.attention_kernels == "flash, efficient, math"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("capability", "expected"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_8_bit_products_need_a_new_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], expected: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert cuda.Config().build().has_fp8 == expected


@pytest.mark.usefixtures("gpu")
def test_determinism_is_a_choice() -> None:
    cuda.Config().build()
    assert not torch.are_deterministic_algorithms_enabled()
    cuda.Config(deterministic=True).build()
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


@pytest.mark.usefixtures("gpu")
def test_nccl_connects_from_its_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(
        dist, "init_process_group", lambda backend, **settings: asked.update(settings)
    )
    monkeypatch.delenv("RANK", raising=False)
    accelerator = cuda.Config().build()
    World.start(5).connect(accelerator.collective_backend, accelerator.collective_device)
    assert asked["device_id"] == torch.device("cuda", 0)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("given", "kept"), [(None, "2000"), ("0", "0")])
def test_nccl_records_its_last_collectives(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    monkeypatch.setenv(RECORDER, given or "")
    if given is None:
        monkeypatch.delenv(RECORDER)
    cuda.Config().build()
    assert os.environ[RECORDER] == kept


@pytest.mark.usefixtures("gpu")
def test_compiled_kernels_stay_on_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / f"triton-{os.getuid()}"
    cuda.Config().build()
    assert os.environ[KERNELS] == str(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.setenv(KERNELS, "/chosen")
    cuda.Config().build()
    assert os.environ[KERNELS] == "/chosen"


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["open to others", "a link", "a file", "of another user"])
def test_kernels_of_others_are_not_loaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str
) -> None:
    folder = tmp_path / f"triton-{os.getuid()}"
    match kind:
        case "open to others":
            folder.mkdir()
            folder.chmod(0o777)
        case "a link":
            (tmp_path / "theirs").mkdir(0o700)
            folder.symlink_to(tmp_path / "theirs")
        case "a file":
            folder.touch(0o700)
        case _:
            folder.mkdir(0o700)
            owner = os.getuid()
            monkeypatch.setattr(os, "getuid", lambda: owner + 1)
            folder.rename(tmp_path / f"triton-{owner + 1}")
    cuda.Config().build()
    assert KERNELS not in os.environ


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("given", "kept"), [(None, "2"), ("1", "2"), ("0", "0"), ("3", "3")])
def test_nccl_leaves_the_process_alive_when_a_collective_fails(
    monkeypatch: pytest.MonkeyPatch, given: str | None, kept: str
) -> None:
    """Also under torchrun, which sets 1; a choice of the user stays."""
    monkeypatch.delenv(cuda._ERROR_HANDLING, raising=False)
    if given is not None:
        monkeypatch.setenv(cuda._ERROR_HANDLING, given)
    cuda.Config().build()
    assert os.environ[cuda._ERROR_HANDLING] == kept
    monkeypatch.setenv(cuda._ERROR_HANDLING, "")  # which is undone after the test


class Runtime:
    """Calls of CUDA's runtime, which answers with `status`, and remembers an error."""

    def __init__(self, status: int) -> None:
        self.status, self.locked, self.last_error = status, dict[int, int](), 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self.status == 0:
            self.locked[address] = size
        self.last_error = self.status
        return self.status

    def launch(self, *_: object, **__: object) -> None:
        """Any kernel, whose check reads and clears the last error."""
        error, self.last_error = self.last_error, 0
        if error:
            raise RuntimeError(f"CUDA error {error}")

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


@pytest.mark.parametrize("status", [0, 2])
def test_memory_of_any_size_is_page_locked_until_it_is_freed(
    monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    """torch's own is rounded up to a power of two."""
    runtime = Runtime(status)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "device", _Nothing)
    monkeypatch.setattr(torch, "ones", runtime.launch)
    memory = host_memory.reserve(4097, torch.device("cuda", 0))
    runtime.launch()  # reports no error of an earlier call
    assert not memory.any()
    assert list(runtime.locked.values()) == [4097] * (status == 0)
    view = memory[5:].view(torch.uint8)
    del memory
    assert len(runtime.locked) == (status == 0)
    del view
    assert not runtime.locked


class _Nothing:
    def __init__(self, device: torch.device) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *error: object) -> None: ...


def test_sorted_gradients_of_embeddings_are_those_of_atomics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ids = torch.randint(0, 7, (3, 50), generator=torch.Generator().manual_seed(0))
    found = []
    for in_order in (True, False):
        monkeypatch.setattr(
            embeddings, "adds_rows_in_order", lambda device, answer=in_order: answer
        )
        table = torch.linspace(-1, 1, 7 * 4).view(7, 4).requires_grad_()
        rows, matrix = embeddings._Lookup.apply(table, ids)
        (rows.square().sum() + matrix.cos().sum()).backward()
        found.append(table.grad)
    torch.testing.assert_close(found[1], found[0])
    assert kernels.adds_rows_in_order(torch.device("cpu"))
    assert not kernels.adds_rows_in_order(torch.device("cuda", 0))


@pytest.mark.usefixtures("gpu")
def test_a_number_is_read_through_page_locked_memory_once_its_copy_is_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[str] = []

    class Event:
        def record(self) -> None:
            calls.append("record")

        def synchronize(self) -> None:
            calls.append("synchronize")

    empty = torch.empty

    def pinned(*shape: Any, pin_memory: bool, **options: Any) -> torch.Tensor:
        assert pin_memory
        return empty(*shape, **options)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch, "empty", pinned)
    accelerator = cuda.CudaAccelerator(0)
    assert accelerator.runs_behind
    read = accelerator.read_later(torch.tensor(3.0, dtype=torch.float64))
    assert calls == ["record"]  # nothing is waited for in the step itself
    assert read() == 3.0
    assert calls == ["record", "synchronize"]
