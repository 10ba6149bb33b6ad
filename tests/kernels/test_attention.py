"""The fused attention kernel against eager attention, interpreted or on a GPU; its operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.accelerators.flash import attention, supports

pytest.importorskip("triton")
ROUNDED = {"float16": 2e-3, "bfloat16": 2e-2}
"""Tolerances of cases by a part of their name: a few units in the last place of the results."""

a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=a_gpu)])
def device(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def tolerance(device: str) -> float:
    """Of fp32. A GPU's exponentials are approximate."""
    return 2e-6 if device == "cpu" else 1e-5


@pytest.fixture(scope="module")
def found(device: str) -> dict[str, Any]:
    """The results of all checks of tests/kernels/checks.py."""
    command = [sys.executable, "-m", "tests.kernels.checks", device]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": str(int(device == "cpu"))},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    results: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return results


def test_cases_agree_with_eager_attention(found: dict[str, Any], tolerance: float) -> None:
    """With every mask, bias, precision and head width; results and all gradients."""
    assert isinstance(found["cases"], dict), found["cases"]
    assert len(found["cases"]) > 20
    wrong = {
        name: errors
        for name, errors in found["cases"].items()
        if max(errors.values()) > max([tolerance, *(ROUNDED[k] for k in ROUNDED if k in name)])
    }
    assert wrong == {}
    assert sum("bias" in errors for errors in found["cases"].values()) > 8


def test_the_table_of_relative_positions_gets_its_gradient(
    found: dict[str, Any], tolerance: float
) -> None:
    assert isinstance(found["relative_bias"], dict), found["relative_bias"]
    assert max(found["relative_bias"].values()) < tolerance


def test_dropout_has_the_bits_of_eager_dropout(found: dict[str, Any]) -> None:
    masks = found["dropout_masks"]
    assert isinstance(masks, dict), masks
    assert len(masks) == 6
    assert all(masks.values()), masks


def test_a_query_without_keys_gets_zeros(found: dict[str, Any]) -> None:
    assert found["empty_rows"] == {"zeros": True, "finite": True}


def test_gradients_are_deterministic(found: dict[str, Any]) -> None:
    assert found["deterministic"] is True


def test_blocks_of_other_segments_are_skipped(found: dict[str, Any]) -> None:
    """Without a change in any bit, whatever the order of segments."""
    assert found["unread"] == dict.fromkeys(("result", "query", "key", "value"), True)
    assert isinstance(found["skipping"], dict), found["skipping"]
    assert len(found["skipping"]) == 7
    assert all(found["skipping"].values()), found["skipping"]


def test_packed_rows_need_few_blocks(found: dict[str, Any]) -> None:
    """Documents of 500 to 2,000 tokens in rows of 8,192, and of 50 to 400 in rows of 512."""
    shares = found["visited"]
    assert isinstance(shares, dict), shares
    for kernel in ("forward", "query gradient", "key gradient"):
        assert shares[f"8,192, {kernel}"] < 0.23
        assert shares[f"8,192, {kernel}, without masks"] > 0.15
        assert shares[f"512, {kernel}"] < 0.75
        assert shares[f"one document, {kernel}"] == 1
        assert shares[f"one document, {kernel}, without masks"] == 1


def test_the_operator_passes_the_checks_of_pytorch(found: dict[str, Any]) -> None:
    assert isinstance(found["operator"], dict), found["operator"]
    assert set(found["operator"].values()) == {"SUCCESS"}


def test_it_compiles_to_one_graph(found: dict[str, Any]) -> None:
    assert isinstance(found["compiled"], dict), found["compiled"]
    assert max(found["compiled"].values()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fake_tensors_have_the_shapes_and_strides(dtype: torch.dtype) -> None:
    with FakeTensorMode():
        query = torch.empty(2, 5, 3, 64, dtype=dtype).transpose(1, 2).requires_grad_()
        key, value = (torch.empty(2, 3, 7, 64, dtype=dtype, requires_grad=True) for _ in range(2))
        bias = torch.empty(3, 11, requires_grad=True)
        result = attention(query, key, value, bias=bias, window=2)
        assert (result.shape, result.dtype) == ((2, 3, 5, 64), dtype)
        assert result.transpose(1, 2).is_contiguous()
        gradients = torch.autograd.grad(result.sum(), [query, key, value, bias])
        for gradient, x in zip(gradients, (query, key, value, bias), strict=True):
            assert (gradient.shape, gradient.dtype) == (x.shape, x.dtype)


def test_compiled_graphs_have_the_operator() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=backend, fullgraph=True)
    def mix(query: torch.Tensor) -> torch.Tensor:
        return attention(query, query, query, causal=True)

    with FakeTensorMode():
        result = mix(torch.empty(2, 3, 5, 64))
    (graph,) = graphs
    assert [n.target for n in graph.graph.nodes].count(torch.ops.samestep.attention) == 1
    assert result.shape == (2, 3, 5, 64)


def test_other_tensors_are_left_to_eager_attention() -> None:
    assert not supports(*[torch.empty(1, 1, 4, 64)] * 3)  # without TRITON_INTERPRET
    assert not supports(*[torch.empty(1, 1, 4, 48, device="meta")] * 3)


@pytest.mark.parametrize("installed", [True, False])
def test_what_the_kernel_takes(installed: bool) -> None:
    code = f"""
import sys, torch
if not {installed}:
    sys.modules["triton"] = None
from trainer.accelerators.flash import supports
def taken(width, dtype, other=None):
    query = torch.empty(1, 1, 4, width, dtype=dtype)
    key = query.to(other or dtype)
    return supports(query, key, key)
print(taken(64, torch.float16), taken(96, torch.float32), taken(128, torch.bfloat16))
print(taken(48, torch.float32), taken(64, torch.float64), taken(64, torch.float32, torch.float16))
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    first, second = done.stdout.splitlines()
    assert first.split() == [str(installed)] * 3
    assert second.split() == ["False"] * 3


def test_wrong_shapes_are_named() -> None:
    query, key = torch.empty(2, 3, 5, 64), torch.empty(2, 3, 7, 64)
    segments = torch.ones(2, 5, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"Pass key_segments\."):
        attention(query, key, key, segments=segments)
    with pytest.raises(ValueError, match=r"key_segments is given without segments"):
        attention(query, key, key, key_segments=segments)
    with pytest.raises(ValueError, match=r"bias has shape \[3, 12\]\. Give it \[3, 11\]\."):
        attention(query, key, key, bias=torch.empty(3, 12))
