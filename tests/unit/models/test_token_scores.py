"""Scores in chunks equal those of whole logits, in values and gradients, without their memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from trainer.models import heads, scores_of
from trainer.models import token_scores as module
from trainer.models.families import (
    bart,
    bert,
    bilm,
    deberta_v2,
    electra,
    gpt2,
    lstm,
    roberta,
    t5,
    xlnet,
)
from trainer.models.inputs import Inputs
from trainer.models.token_scores import Target, TokenScore, score_hidden, score_logits
from trainer.objectives.rows import score_output

ROWS, PREDICTIONS, WIDTH, VOCABULARY = 3, 20, 16, 500
POSITIONS = ROWS * PREDICTIONS
SHAPE = {"vocab_size": VOCABULARY, "layers": 2, "width": 32, "heads": 2, "ffn_width": 48}
T5 = {**SHAPE, "head_width": 16}
TABLE = {**SHAPE, "max_positions": 64}
RECURRENT = {"vocab_size": VOCABULARY, "layers": 2, "hidden_size": 32, "embedding_width": 24}
CHUNKS = {"one": POSITIONS, "two": 30, "uneven": 23, "single positions": 1}
"""Positions in a chunk."""

MODELS: dict[str, tuple[Any, dict[str, str]]] = {  # configuration; outputs -> columns of weights
    "bert": (bert.Config(**TABLE), {"tokens": "weights"}),
    "bert, next sentence": (bert.Config(**TABLE, nsp=True), {"tokens": "weights"}),
    "bert, spans": (
        bert.Config(**TABLE, span_boundary=True),
        {"tokens": "weights", "span_boundary": "others"},
    ),
    "causal bert": (bert.Config(**TABLE, causal=True), {"next_tokens": "weights"}),
    "roberta": (roberta.Config(**TABLE), {"tokens": "weights"}),
    "electra's generator": (electra.Config(**TABLE, masked_lm=True), {"tokens": "weights"}),
    "gpt2": (gpt2.Config(**TABLE), {"next_tokens": "weights"}),
    "t5": (t5.Config(**T5), {"target_tokens": "weights"}),
    "t5, untied": (t5.Config(**T5, tied=False), {"target_tokens": "weights"}),
    "bart": (bart.Config(**TABLE), {"target_tokens": "weights"}),
    "xlnet": (xlnet.Config(**TABLE), {"permuted_tokens": "weights"}),
    "lstm": (lstm.Config(**RECURRENT), {"next_tokens": "weights"}),
    "bilm": (
        bilm.Config(**RECURRENT, proj_size=24, tied=False),
        {"next_tokens": "weights", "previous_tokens": "others"},
    ),
    "deberta, mask decoder": (
        deberta_v2.Config(**TABLE, position_buckets=8, mask_decoder=True),
        {"tokens": "weights"},
    ),
}


@contextmanager
def chunks_of(positions: int) -> Iterator[None]:
    patch = pytest.MonkeyPatch()
    with patch.context() as patched:
        patched.setattr(module, "CHUNK_BYTES", 4 * VOCABULARY * positions)
        yield


def inputs(bias: bool = True) -> tuple[Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(ROWS, PREDICTIONS, WIDTH, generator=generator)
    matrix = torch.randn(VOCABULARY, WIDTH, generator=generator)
    added = torch.randn(VOCABULARY, generator=generator) if bias else None
    return tuple(
        None if each is None else each.requires_grad_() for each in (hidden, matrix, added)
    )


def target(z_loss: float = 0.0, weights: Tensor | None = None) -> Target:
    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, VOCABULARY, (ROWS, PREDICTIONS), generator=generator)
    if weights is None:
        weights = torch.rand(ROWS, PREDICTIONS, generator=generator).round()
    return Target(labels, weights, z_loss)


def chunked(
    factors: tuple[Tensor, Tensor, Tensor | None], target: Target, positions: int
) -> TokenScore:
    with chunks_of(positions):
        return TokenScore.unpack(score_hidden(*factors, target))


def whole(factors: tuple[Tensor, Tensor, Tensor | None], target: Target) -> TokenScore:
    return score_logits(F.linear(*factors), target)


def gradients(score: TokenScore, factors: tuple[Tensor | None, ...]) -> list[Tensor]:
    needed = [each for each in factors if each is not None and each.requires_grad]
    return list(torch.autograd.grad(score.loss / 7, needed))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("positions", CHUNKS.values(), ids=CHUNKS)
def test_equals_whole_logits(positions: int, z_loss: float, bias: bool):
    own, theirs = inputs(bias), inputs(bias)
    found = chunked(own, target(z_loss), positions)
    expected = whole(theirs, target(z_loss))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    pairs = zip(gradients(found, own), gradients(expected, theirs), strict=True)
    for gradient, reference in pairs:
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


def test_equals_torchs_cross_entropy_in_double_precision():
    own, exact = inputs(), inputs()
    found = chunked(own, target(), 23)
    logits = F.linear(*(each.double() for each in exact)).flatten(0, 1)  # type: ignore[union-attr]
    each = F.cross_entropy(logits, target().labels.flatten(), reduction="none")
    weights = target().weights.flatten()
    loss = (each * weights).sum()
    assert found.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    correct = (logits.argmax(-1) == target().labels.flatten()) * weights
    assert found.correct.item() == correct.sum().item()
    reference = torch.autograd.grad(loss / 7, exact)  # type: ignore[arg-type]
    for gradient, expected in zip(gradients(found, own), reference, strict=True):
        torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)


def test_weights_of_zero_give_zeros():
    own = inputs()
    score = chunked(own, target(1e-2, torch.zeros(ROWS, PREDICTIONS)), 23)
    assert torch.stack(score).tolist() == [0.0] * 5
    assert all(not gradient.any() for gradient in gradients(score, own))


def test_a_repetition_has_the_same_bits():
    runs = []
    for _ in range(2):
        own = inputs()
        score = chunked(own, target(1e-2), 23)
        runs.append([torch.stack(score), *gradients(score, own)])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.parametrize("frozen", [(0,), (1,), (1, 2), (0, 1)])
def test_what_is_frozen_gets_no_gradient(frozen: tuple[int, ...]):
    own, theirs = inputs(), inputs()
    for factors in (own, theirs):
        for index in frozen:
            factors[index].requires_grad_(False)  # type: ignore[union-attr]
    found, expected = chunked(own, target(), 23), whole(theirs, target())
    saved = found.loss.grad_fn.next_functions[0][0].saved_tensors  # type: ignore[union-attr]
    assert [each is None for each in saved] == [index in frozen for index in range(3)]
    for gradient, reference in zip(gradients(found, own), gradients(expected, theirs), strict=True):
        torch.testing.assert_close(gradient, reference, rtol=1e-5, atol=1e-6)


def test_without_gradients_only_scores_are_computed():
    with torch.no_grad():
        found = chunked(inputs(), target(), 23)
        torch.testing.assert_close(found, whole(inputs(), target()), rtol=1e-6, atol=0)
    assert not found.loss.requires_grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_gradients_are_as_exact_as_those_of_whole_logits(dtype: torch.dtype):
    own, theirs, exact = inputs(), inputs(), inputs()
    reference = gradients(whole(exact, target()), exact)
    with torch.autocast("cpu", dtype):
        found, expected = chunked(own, target(), 23), whole(theirs, target())
        # A later product with the same matrix still has a gradient: no cast of it was cached.
        again = F.linear(own[0], own[1]).sum()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=0)
    (later,) = torch.autograd.grad(again, own[1])  # type: ignore[arg-type]
    assert later.any()
    ours, others = gradients(found, own), gradients(expected, theirs)
    for gradient, other, right in zip(ours, others, reference, strict=True):
        assert gradient.dtype == torch.float32
        assert (gradient - right).norm() <= 1.1 * (other - right).norm()


def test_is_differentiated_once():
    score = chunked(inputs(), target(), 23)
    score.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        score.loss.backward()


class Largest(TorchDispatchMode):
    """Records the size of the largest tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        result = function(*args, **(kwargs or {}))
        sizes = [each.numel() for each in tree_leaves(result) if isinstance(each, Tensor)]
        self.elements = max(self.elements, *sizes, 0)
        return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_logits_are_never_whole(dtype: torch.dtype | None):
    found = {}
    for name, score in (("whole", whole), ("chunked", lambda *each: chunked(*each, 10))):
        own = inputs()
        with Largest() as largest, torch.autocast("cpu", dtype, enabled=dtype is not None):
            score(own, target()).loss.backward()
        found[name] = largest.elements
    # The largest tensor is the matrix's gradient then.
    assert found == {"whole": POSITIONS * VOCABULARY, "chunked": VOCABULARY * WIDTH}


def batch_of(name: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def ids(count: int) -> Tensor:
        return torch.randint(0, VOCABULARY, (ROWS, count), generator=generator)

    predicted = torch.arange(1, PREDICTIONS + 1).expand(ROWS, -1)
    batch = {
        "tokens": ids(32),
        "positions": torch.arange(32).expand(ROWS, -1),
        "predicted": predicted,
        "dropout_key": torch.arange(ROWS, dtype=torch.int32),
        "labels": ids(PREDICTIONS),
        "weights": torch.rand(ROWS, PREDICTIONS, generator=generator).round(),
        "others": torch.rand(ROWS, PREDICTIONS, generator=generator),
        "span_first": predicted,
        "span_last": predicted + 1,
        "span_offset": predicted % 3,
        "rank": torch.arange(32).expand(ROWS, -1),
    }
    if name.startswith(("t5", "bart")):
        batch["target_tokens"] = ids(32)
    return batch


def passes(
    model: nn.Module, name: str, outputs: dict[str, str], bf16: bool
) -> tuple[set[str], dict[str, TokenScore], dict[str, Tensor | None]]:
    """The outputs, the scores, and the gradients of all parameters."""
    batch = batch_of(name)
    targets = {
        output: Target(batch["labels"], batch[column], 1e-3) for output, column in outputs.items()
    }
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        found = model(Inputs.of(batch, targets), frozenset(outputs))
        scores = {each: score_output(found, each, targets[each]) for each in outputs}
    returned = set(found)
    sum((score.loss for score in scores.values()), torch.zeros(())).backward()
    return returned, scores, {each: p.grad for each, p in model.named_parameters()}


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("name", MODELS)
def test_models_return_the_same_scores_in_chunks(
    name: str, bf16: bool, build: Callable[..., nn.Module]
):
    config, outputs = MODELS[name]
    model = build(config).train()
    returned, expected, reference = passes(model, name, outputs, bf16)
    assert returned == set(outputs)  # one chunk: logits, as without targets
    with chunks_of(23):
        returned, found, own = passes(model, name, outputs, bf16)
    assert returned == {scores_of(output) for output in outputs}
    tolerance = 2e-2 if bf16 else 1e-5
    for output in outputs:
        torch.testing.assert_close(found[output], expected[output], rtol=1e-5, atol=0)
    for each, gradient in own.items():
        right = reference[each]
        assert (gradient is None) == (right is None), each
        if right is not None:
            assert gradient is not None
            error = (gradient - right).norm() / right.norm().clamp(min=1e-12)
            assert error < tolerance or not right.any(), (each, error)


@pytest.mark.parametrize("positions", [POSITIONS, 23], ids=["one chunk", "chunks"])
@pytest.mark.parametrize("name", ["bert", "t5", "bart", "xlnet"])
def test_a_vocabulary_is_padded_where_its_size_is_slow(
    name: str, positions: int, build: Callable[..., nn.Module], monkeypatch: pytest.MonkeyPatch
):
    config, outputs = MODELS[name]
    model = build(config).train()
    _, expected, reference = passes(model, name, outputs, bf16=False)
    monkeypatch.setattr(heads, "product_multiple", lambda device: 64)  # 500 becomes 512
    with chunks_of(positions):
        returned, found, own = passes(model, name, outputs, bf16=False)
    assert returned == {scores_of(output) for output in outputs}
    for output in outputs:
        torch.testing.assert_close(found[output], expected[output], rtol=1e-5, atol=0)
    for each, gradient in own.items():
        torch.testing.assert_close(gradient, reference[each], rtol=1e-4, atol=1e-5)


def test_frozen_token_embeddings_get_no_gradient(build: Callable[..., nn.Module]):
    model = build(MODELS["bert"][0]).train()
    model.embeddings.tokens.weight.requires_grad_(False)
    with chunks_of(23):
        _, _, found = passes(model, "bert", {"tokens": "weights"}, bf16=False)
    assert found["embeddings.tokens.weight"] is None
    assert found["head.dense.weight"] is not None


def test_a_tasks_head_beside_the_tokens_keeps_its_logits(build: Callable[..., nn.Module]):
    model = build(gpt2.Config(**TABLE, head="classification", labels=("a", "b")))
    batch = batch_of("gpt2")
    batch["predicted"] = batch["predicted"][:, -1:]
    labels = batch["tokens"][:, 1:]
    tokens = Target(labels, torch.ones(labels.shape))
    with chunks_of(23):
        found = model(
            Inputs.of(batch, {"next_tokens": tokens}),
            frozenset({"classification", "next_tokens"}),
        )
    assert found.keys() == {"classification", "scores.next_tokens"}
    expected = model(Inputs.of(batch), frozenset({"classification", "next_tokens"}))
    score = TokenScore.unpack(found["scores.next_tokens"])
    assert torch.equal(found["classification"], expected["classification"])
    torch.testing.assert_close(
        score, score_logits(expected["next_tokens"], tokens), rtol=1e-5, atol=0
    )


def test_logits_stay_logits_without_a_target(build: Callable[..., nn.Module]):
    model = build(MODELS["bert"][0]).eval()
    with chunks_of(1):
        found = model(Inputs.of(batch_of("bert")), frozenset({"tokens"}))
    assert found["tokens"].shape == (ROWS, PREDICTIONS, VOCABULARY)
