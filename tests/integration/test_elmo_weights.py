"""ELMo's published weights: a file in their format, against their own computation in NumPy."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import numpy.typing as npt
import pytest

from tests.integration import tasks
from tests.integration.commands import Samestep
from trainer.checkpoint import integrity
from trainer.training.weights.loading import load_weights

Float = npt.NDArray[Any]

WIDTH, FILTERS, HIDDEN, PROJECTED, HIGHWAYS, LAYERS, CLIP = 4, ((1, 4), (3, 8)), 10, 6, 2, 2, 3.0
WORDS = ("the", "statement", "naïve", "a", "x" * 60)
MODEL = (
    f"model={{kind: bilm, vocab_size: 8, layers: {LAYERS}, hidden_size: {HIDDEN}, "
    f"proj_size: {PROJECTED}, embedding_width: {PROJECTED}, tied: false, clip: {CLIP}, "
    f"characters: {{longest: 48, width: {WIDTH}, filters: {[list(f) for f in FILTERS]}, "
    f"highways: {HIGHWAYS}}}}}"
)


@pytest.fixture(scope="module")
def weights() -> dict[str, Any]:
    """The arrays of a file, by name; so large that cells and projections are clipped."""
    random = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 1.0) -> Float:
        return (scale * random.standard_normal(shape)).astype(np.float32)

    features = sum(count for _, count in FILTERS)
    found = {"char_embed": normal(261, WIDTH)}
    for number, (width, count) in enumerate(FILTERS):
        found[f"CNN/W_cnn_{number}"] = normal(1, width, WIDTH, count, scale=0.5)
        found[f"CNN/b_cnn_{number}"] = normal(count)
    for number in range(HIGHWAYS):
        for part in ("transform", "carry"):
            found[f"CNN_high_{number}/W_{part}"] = normal(features, features, scale=0.3)
            found[f"CNN_high_{number}/b_{part}"] = normal(features)
    found["CNN_proj/W_proj"] = normal(features, PROJECTED)
    found["CNN_proj/b_proj"] = normal(PROJECTED)
    for direction in range(2):
        for layer in range(LAYERS):
            own = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            found[f"{own}/W_0"] = normal(2 * PROJECTED, 4 * HIDDEN)
            found[f"{own}/B"] = normal(4 * HIDDEN)
            found[f"{own}/W_P_0"] = normal(HIDDEN, PROJECTED, scale=1.5)
    return found


def sigmoid(x: Float) -> Float:
    return 1 / (1 + np.exp(-x))


def embedded(weights: dict[str, Any], word: str) -> Float:
    """A word's embedding (bilm/model.py): 50 characters, with marks of the word and padding."""
    marks = {"<S>": [256], "</S>": [257]}
    content = marks.get(word, list(word.encode()[:48]))
    ids = [258, *content, 259]
    table = weights["char_embed"][ids + [260] * (50 - len(ids))]
    features = []
    for number, (width, _) in enumerate(FILTERS):
        kernel = weights[f"CNN/W_cnn_{number}"][0]
        windows = [table[at : at + width] for at in range(50 - width + 1)]
        scores = [np.einsum("wd,wdf->f", window, kernel) for window in windows]
        features.append(np.maximum(np.max(scores, axis=0) + weights[f"CNN/b_cnn_{number}"], 0))
    x = np.concatenate(features)
    for number in range(HIGHWAYS):
        own = f"CNN_high_{number}"
        carry = sigmoid(x @ weights[f"{own}/W_carry"] + weights[f"{own}/b_carry"])
        changed = np.maximum(x @ weights[f"{own}/W_transform"] + weights[f"{own}/b_transform"], 0)
        x = carry * changed + (1 - carry) * x
    return x @ weights["CNN_proj/W_proj"] + weights["CNN_proj/b_proj"]


def layers(weights: dict[str, Any], words: list[str]) -> tuple[Float, int]:
    """The states of all layers, [S, 1 + LAYERS, 2 P], and how many numbers were clipped."""
    weights = {name: array.astype(np.float64) for name, array in weights.items()}
    inputs = np.stack([embedded(weights, word) for word in words])
    found, clipped = [[inputs], [inputs]], 0
    for direction, states in enumerate(found):
        for layer in range(LAYERS):
            own = f"RNN_{direction}/RNN/MultiRNNCell/Cell{layer}/LSTMCell"
            hidden, cell = np.zeros(PROJECTED), np.zeros(HIDDEN)
            before = states[-1][::-1] if direction else states[-1]
            outputs = []
            for x in before:
                gates = np.concatenate([x, hidden]) @ weights[f"{own}/W_0"] + weights[f"{own}/B"]
                i, g, f, o = np.split(gates, 4)
                cell = sigmoid(f + 1) * cell + sigmoid(i) * np.tanh(g)
                projected = sigmoid(o) * np.tanh(np.clip(cell, -CLIP, CLIP))
                hidden = projected @ weights[f"{own}/W_P_0"]
                clipped += int((np.abs(cell) > CLIP).sum() + (np.abs(hidden) > CLIP).sum())
                cell, hidden = np.clip(cell, -CLIP, CLIP), np.clip(hidden, -CLIP, CLIP)
                outputs.append(hidden + x if layer else hidden)
            states.append(np.stack(outputs)[:: -1 if direction else 1])
    return np.stack([np.concatenate(pair, -1) for pair in zip(*found, strict=True)], 1), clipped


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("words")
    text = " ".join(word for word in WORDS for _ in range(30))
    rows = [{"text": f"{text} {number}"} for number in range(40)]
    return tasks.build_words(folder, rows, vocab_size=10)


Convert = Callable[..., Any]


@pytest.fixture
def convert(
    weights: dict[str, Any],
    dataset: Path,
    experiment_file: str,
    tmp_path: Path,
    samestep: Samestep,
) -> Convert:
    size = len(json.loads((dataset / "tokenizer/tokenizer.json").read_text())["model"]["vocab"])

    def run(*settings: str, without: str = "") -> Any:
        file = tmp_path / "weights.hdf5"
        with h5py.File(file, "w") as opened:
            for name, array in weights.items():
                if not without or not re.search(without, name):
                    opened[name] = array
        given = (MODEL, f"model.vocab_size={size}", "objective={kind: bilm}", "data.threads=0")
        paths = (f"data.path={dataset}", f"output={tmp_path / 'run'}")
        return samestep("checkpoint", "convert", file, experiment_file, *given, *paths, *settings)

    return run


def test_features_are_those_of_the_published_program(
    convert: Convert, weights: dict[str, Any], tmp_path: Path, samestep: Samestep
) -> None:
    """With the marks of a text, letters of two bytes, and a word that is too long."""
    result = convert()
    assert result.code == 0, result.err
    texts = tmp_path / "texts.txt"
    texts.write_text(f"the naïve statement {WORDS[-1]}\na\n")
    output = tmp_path / "all.npy"
    given = ("--layers", "all", "--pool", "none", "--output", output)
    result = samestep("features", tmp_path / "run", texts, *given)
    assert result.code == 0, result.err
    expected, clipped = zip(
        *(
            layers(weights, ["<S>", *line.split(), "</S>"])
            for line in texts.read_text().splitlines()
        ),
        strict=True,
    )
    assert sum(clipped) > 20
    np.testing.assert_allclose(np.load(output), np.concatenate(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.long
def test_training_goes_on_from_them(
    convert: Convert, weights: dict[str, Any], tmp_path: Path, samestep: Samestep
) -> None:
    assert convert("optimizer.lr=1e-9").code == 0
    again = convert()
    assert (again.code, "has a checkpoint of step 0 already" in again.message) == (1, True)
    run = tmp_path / "run"
    assert samestep("train", run / "config.yaml").code == 0
    trained = load_weights(str(run))
    assert trained.step is not None
    assert trained.step > 4
    # The rate is too small to move them from the file's.
    found = trained.tensors["embeddings.characters.projection.weight"]
    np.testing.assert_allclose(found, weights["CNN_proj/W_proj"].T, rtol=1e-4, atol=1e-4)
    verified = samestep("ledger", "verify", run)
    assert verified.code == 0, verified.err
    assert json.loads((run / "ledger.jsonl").read_text().splitlines()[0])["kind"] == "taken"
    # Long runs keep their newest checkpoints only.
    integrity.remove_step(integrity.step_folder(run / "checkpoints", 0))
    lost = samestep("replay", run, 1)
    assert "the run began with ELMo's published weights, and no checkpoint" in lost.message


def test_published_weights_need_clipping(convert: Convert) -> None:
    result = convert("model.clip=null")
    assert result.code == 0
    assert "published weights need model.clip=3.0" in result.err


@pytest.mark.parametrize(
    ("settings", "without", "message"),
    [
        (("model.hidden_size=12",), "", "the experiment's model section does not describe"),
        (("model.characters.highways=1",), "", "does not describe the model"),
        (("optimizer={kind: adafactor, lr: 1e-3}",), "", "Set optimizer to {kind: adamw}"),
        ((), "char_embed", "does not hold ELMo's weights"),
        ((), "W_P_0", "does not hold ELMo's weights"),
    ],
)
def test_what_does_not_fit_is_rejected(
    convert: Convert, tmp_path: Path, settings: tuple[str, ...], without: str, message: str
) -> None:
    result = convert(*settings, without=without)
    assert result.code in (1, 2)
    assert message in result.message, result.message
    assert not list((tmp_path / "run").glob("checkpoints/step-*"))
