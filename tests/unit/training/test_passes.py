from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from trainer.objectives import Loss
from trainer.strategies.kinds.single import Single
from trainer.training.evaluation import score
from trainer.training.passes import accumulate_gradients


class Spy:
    """An objective with a given weight that records the columns which reach the device."""

    def __init__(self, weight: float = 1.0) -> None:
        self.weight = weight

    def weights(self, batch: dict[str, Tensor]) -> dict[str, float]:
        return {"spy": self.weight}

    def loss(self, model: nn.Module, batch: dict[str, Tensor], totals: dict[str, Tensor]) -> Loss:
        self.columns = set(batch)
        loss = model.weight.sum() * self.weight / totals["spy"]
        return Loss(loss, {"loss": (loss.detach(), torch.ones(()))})


@pytest.fixture
def strategy() -> Single:
    accelerator: Any = SimpleNamespace(
        device=torch.device("cpu"),
        compiles=False,
        precisions=("fp32",),
        to_device=dict,
        autocast=lambda _: torch.enable_grad(),
    )
    strategy = Single(accelerator, SimpleNamespace(rank=0, size=1), "fp32")
    strategy.all_reduce = lambda value: value
    return strategy


def batch(segments: list[list[int]]) -> dict[str, Tensor]:
    return {
        "tokens": torch.zeros(2, 2),
        "segments": torch.tensor(segments),
        "digest": torch.zeros(2),
    }


@pytest.mark.parametrize(
    ("segments", "needed"),
    [
        ([[1, 1], [1, 1]], False),
        ([[1, 1], [1, 2]], True),
        ([[1, 1], [1, 0]], True),
        ([[2, 2], [1, 1]], True),
    ],
)
def test_segments_are_left_out_if_each_row_is_one(
    strategy: Single, segments: list[list[int]], needed: bool
):
    spy = Spy()
    accumulate_gradients(nn.Linear(1, 1), spy, strategy, [batch(segments)])
    assert spy.columns == {"tokens"} | ({"segments"} if needed else set())


def test_compiled_layers_always_get_segments(strategy: Single):
    spy = Spy()
    strategy.compiles_layers = True
    accumulate_gradients(nn.Linear(1, 1), spy, strategy, [batch([[1, 1], [1, 1]])])
    assert spy.columns == {"tokens", "segments"}


@pytest.mark.parametrize(
    ("segments", "targets", "needed"),
    [
        ([[1, 1], [1, 1]], [[1], [1]], False),
        ([[1, 1], [1, 1]], [[1], [0]], True),
        ([[1, 0], [1, 1]], [[1], [1]], True),
    ],
)
def test_segments_of_both_sides_go_together(
    strategy: Single, segments: list[list[int]], targets: list[list[int]], needed: bool
):
    spy = Spy()
    both = {**batch(segments), "target_segments": torch.tensor(targets)}
    accumulate_gradients(nn.Linear(1, 1), spy, strategy, [both])
    assert spy.columns == {"tokens"} | ({"segments", "target_segments"} if needed else set())


def test_where_nothing_is_predicted_the_loss_is_0(strategy: Single):
    model = nn.Linear(1, 1)
    (metrics,) = accumulate_gradients(model, Spy(weight=0.0), strategy, [batch([[1, 1], [1, 1]])])
    assert metrics["loss"][0] == 0
    assert model.weight.grad == 0


def test_an_evaluation_may_have_nothing_to_predict(strategy: Single) -> None:
    class Nothing(Spy):
        def loss(self, model: Any, batch: Any, totals: Any) -> Loss:
            zero = torch.zeros(())
            return Loss(zero, {"loss": (zero, zero)})

        def loss_of(self, means: dict[str, float]) -> float:
            return means["loss"]

    class Batches(list[Any]):
        examples = 2

        def close(self) -> None: ...

    strategy.accelerator.graph = lambda _: nullcontext()
    found = score(
        nn.Linear(1, 1), Nothing(0.0), strategy, Batches([[batch([[1, 1], [1, 1]])]]), None
    )
    assert found.scores == {}
