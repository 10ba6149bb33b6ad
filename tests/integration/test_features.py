"""`samestep features`: hidden states as transformers has them, in the order of the texts."""

from __future__ import annotations

import base64
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_pipeline.tokenizers.tokenizer import Tokenizer
from tests.integration.commands import Samestep

TEXTS = [
    "the class statement defines a class object",
    "a",
    "names in the body",
    " ".join(["value of the name"] * 20),
]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """The last one is too long for the model of `finished_run`."""
    path = tmp_path / "texts.txt"
    path.write_text("".join(f"{text}\n" for text in TEXTS))
    return path


@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
def test_hidden_states_are_those_of_transformers(
    family: str, dataset_folder: Path, tmp_path: Path, texts: Path, samestep: Samestep
) -> None:
    import torch
    import transformers

    torch.manual_seed(0)
    shapes: dict[str, tuple[Any, Any, dict[str, object]]] = {
        "bert": (transformers.BertForMaskedLM, transformers.BertConfig, {"intermediate_size": 64}),
        "gpt2": (transformers.GPT2LMHeadModel, transformers.GPT2Config, {"n_inner": 64}),
        "t5": (
            transformers.T5ForConditionalGeneration,
            transformers.T5Config,
            {"d_ff": 64, "d_kv": 16},
        ),
    }
    kind, config, own = shapes[family]
    width, layers, heads = {"hidden_size": 32}, {"num_hidden_layers": 3}, {"num_attention_heads": 2}
    model = kind(config(vocab_size=600, **width, **layers, **heads, **own)).eval()
    shutil.copytree(dataset_folder / "tokenizer", tmp_path / "model")
    model.save_pretrained(tmp_path / "model")
    output = tmp_path / "all.npy"
    assert (
        samestep(
            "features",
            tmp_path / "model",
            texts,
            "--output",
            output,
            "--layers",
            "all",
            "--pool",
            "none",
            "--batch-tokens",
            100,
        ).code
        == 0
    )

    tokenizer = Tokenizer.load(dataset_folder / "tokenizer")
    cls, sep = tokenizer.vocabulary.cls, tokenizer.vocabulary.sep
    before, after = {"bert": ([cls], [sep]), "gpt2": ([cls], []), "t5": ([], [sep])}[family]
    rows = [torch.tensor([*before, *ids.tolist(), *after]) for ids in tokenizer.encode_batch(TEXTS)]
    tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    real = torch.nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    encoder = model.get_encoder() if family == "t5" else model.base_model
    with torch.no_grad():
        states = encoder(
            input_ids=tokens, attention_mask=real, output_hidden_states=True
        ).hidden_states
    assert len(states) == 4
    expected = torch.stack(states, 2)[real.bool()].numpy()
    np.testing.assert_allclose(np.load(output), expected, atol=1e-5)
    np.testing.assert_array_equal(
        np.load(tmp_path / "all.offsets.npy"), np.cumsum([0, *map(len, rows)])
    )


def test_pooling_and_mixing(
    finished_run: Path, tmp_path: Path, texts: Path, samestep: Samestep
) -> None:
    """All are computed from what `--layers all --pool none` gives, whatever texts share a batch."""

    def features(name: str, *options: object) -> Any:
        result = samestep(
            "features", finished_run, texts, "--output", tmp_path / f"{name}.npy", *options
        )
        assert result.code == 0, result.err
        assert "1 of 4 texts are longer than the 30 tokens that the model reads" in result.err
        assert "float32" in result.err
        return np.load(tmp_path / f"{name}.npy")

    whole, offsets = (
        features("whole", "--layers", "all", "--pool", "none"),
        np.load(tmp_path / "whole.offsets.npy"),
    )
    assert (whole.shape, whole.dtype, len(offsets)) == ((offsets[-1], 3, 32), np.float32, 5)
    assert offsets[-1] - offsets[-2] == 32
    each = np.split(whole, offsets[1:-1])
    options = ("--batch-tokens", 1)
    pooled = {
        ("first", "-1"): [text[0, 2] for text in each],
        ("mean", "2"): [text[:, 2].mean(0) for text in each],
        ("max", "1,-1"): [text[:, 1:].max(0) for text in each],
        ("last", "2"): [text[-1, 2] for text in each],
        ("weighted", "2"): [
            np.average(text[:, 2], 0, np.arange(1, len(text) + 1)) for text in each
        ],
    }
    for (pool, layers), expected in pooled.items():
        found = features(f"{pool}{layers}", "--pool", pool, "--layers", layers, *options)
        np.testing.assert_allclose(found, np.stack(expected), atol=1e-5)
    mixed = features("mixed", "--layers=-1,1", "--mix", "mean", "--pool", "max")
    np.testing.assert_allclose(
        mixed, np.stack([text[:, 1:].mean(1).max(0) for text in each]), atol=1e-5
    )
    joined = features("joined", "--layers", "2,0", "--mix", "concat")
    np.testing.assert_allclose(
        joined, np.stack([text[:, [2, 0]].mean(0).ravel() for text in each]), atol=1e-5
    )


def test_texts_in_json_lines(
    finished_run: Path, tmp_path: Path, texts: Path, samestep: Samestep
) -> None:
    records = tmp_path / "texts.jsonl"
    records.write_text("\n".join(json.dumps({"review": {"body": text}}) for text in TEXTS))
    for name, options in ((texts, ()), (records, ("--field", "review.body"))):
        output = name.with_suffix(".npy") if name == texts else tmp_path / "json.npy"
        assert samestep("features", finished_run, name, "--output", output, *options).code == 0
    np.testing.assert_array_equal(np.load(tmp_path / "texts.npy"), np.load(tmp_path / "json.npy"))


@pytest.mark.parametrize(
    ("file", "content", "options", "words"),
    [
        ("in.txt", "", (), "in.txt:1: empty file"),
        ("in.txt", "a\n\nb\n", (), "in.txt:2: empty document; correct or remove the line"),
        ("in.txt", None, (), "cannot read in.txt: No such file"),
        ("in.txt", b"\xff\n", (), "in.txt:1: invalid UTF-8"),
        ("in.txt", "a\n", ("--field", "body"), "--field body is for .jsonl files"),
        ("in.jsonl", '{"text": "a"}\n', ("--field", "body"), "in.jsonl:1: no field 'body'"),
        (
            "in.txt",
            "a\n",
            ("--layers", "3"),
            "--layers is 3, and the model has layers 1 to 2",
        ),
        ("in.txt", "a\n", ("--layers=-4"), "--layers is -4, and the model has layers 1 to 2"),
        ("in.txt", "a\n", ("--layers", "last"), "--layers must be all, or numbers"),
        ("in.txt", "a\n", ("--batch-tokens", "0"), "--batch-tokens must be at least 1"),
        ("in.txt", "a\n", ("--output", "out.txt"), "--output out.txt is a NumPy array"),
        (
            "in.txt",
            "a\n",
            ("--output", "none/out.npy"),
            "--output none/out.npy: there is no folder none",
        ),
        ("in.txt", "a\n", ("--output", "there.npy"), "there.npy already exists"),
    ],
)
def test_bad_input(
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    samestep: Samestep,
    file: str,
    content: str | bytes | None,
    options: tuple[str, ...] | str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there.npy").touch()
    if content is not None:
        Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    options = (options,) if isinstance(options, str) else options
    result = samestep("features", finished_run, file, "--output", "out.npy", *options)
    assert result.code in (1, 2)
    assert result.message.startswith(words), result.message
    assert not list(tmp_path.glob("out*"))


def test_a_full_disk_is_named_at_once(
    finished_run: Path, small_disk: Path, tmp_path: Path, samestep: Samestep
) -> None:
    (tmp_path / "in.txt").write_text("a text\n" * 3000)
    result = samestep(
        "features", finished_run, tmp_path / "in.txt", "--output", small_disk / "out.npy"
    )
    assert "cannot write" in result.message
    assert "No space left" in result.message
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("layers", [(), ("--layers", "2")])
def test_attention_of_layers_and_heads(
    layers: tuple[str, ...], finished_run: Path, texts: Path, tmp_path: Path, samestep: Samestep
) -> None:
    """Rows of real tokens are probabilities over the tokens of their text; the page shows them."""
    output = tmp_path / "attention.npy"
    options = ("--attentions", "--batch-tokens", "40", "--output", output)
    assert samestep("features", finished_run, texts, *options, *layers).code == 0
    found = np.load(output)
    tokenizer = Tokenizer.load(finished_run / "tokenizer")
    lengths = [min(32, len(tokens) + 2) for tokens in tokenizer.encode_batch(TEXTS)]
    assert found.shape == (4, 1 if layers else 2, 2, 32, 32)
    for text, length in zip(found, lengths, strict=True):
        np.testing.assert_allclose(text[..., :length, :length].sum(-1), 1, rtol=1e-5)
        assert text.sum() == pytest.approx(text[..., :length, :length].sum(), rel=1e-6)
    page = (tmp_path / "attention.html").read_text()
    (line,) = (line for line in page.splitlines() if line.startswith("const data = "))
    data = json.loads(line.removeprefix("const data = ").removesuffix(";"))
    assert data["layers"] == ([2] if layers else [1, 2])
    for of_text, text, length in zip(data["texts"], found, lengths, strict=True):
        assert len(of_text["tokens"]) == length
        shown = np.frombuffer(base64.b64decode(of_text["data"]), dtype=np.uint8)
        shown = shown.reshape(-1, 2, length, length) / 255
        np.testing.assert_allclose(shown, text[..., :length, :length], atol=1 / 255)
    assert data["texts"][0]["tokens"][0] == "[CLS]"


def test_attention_that_cannot_be_shown_is_refused(
    finished_run: Path, dataset_folder: Path, texts: Path, tmp_path: Path, samestep: Samestep
) -> None:
    import transformers

    output, t5 = tmp_path / "attention.npy", tmp_path / "t5"
    shutil.copytree(dataset_folder / "tokenizer", t5)
    shape = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}
    config = transformers.T5Config(vocab_size=600, **shape)
    transformers.T5ForConditionalGeneration(config).save_pretrained(t5)
    for run, options, message in (
        (finished_run, ("--pool", "mean"), "--attentions cannot be combined with --mix or --pool"),
        (finished_run, ("--layers", "0"), "--layers has 0, the embeddings, which have no"),
        (finished_run, ("--layers", "3"), "the model has layers 1 to 2"),
        (t5, (), "the model does not offer attention.1"),
    ):
        result = samestep("features", run, texts, "--attentions", "--output", output, *options)
        assert (result.code, message in result.message) == (2, True), result.message
        assert not any(path.suffix in (".npy", ".html") for path in tmp_path.iterdir())
