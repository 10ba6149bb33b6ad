"""`samestep generate`, from a run and from what it exports."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import zstandard

from tests.integration.commands import Samestep
from trainer.training.weights.loading import load_weights

OPTIONS = ("--max-new-tokens", 8, "--prefix", "say: ", "--beams", 2)


@pytest.fixture(scope="module")
def t5_run(t5_experiment: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few steps of the small T5."""
    from samestep.cli import main

    run = tmp_path_factory.mktemp("generate") / "run"
    assert main(["train", t5_experiment, f"output={run}", "training.steps=4"]) == 0
    return run


def test_texts_from_files_arguments_and_standard_input(
    samestep: Samestep, t5_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever way they come and whatever is beside them, a text for each, in order.

    Options may come first.
    """
    texts = [
        "the statement of a loop",
        "a",
        "names in classes are not visible in functions",
        "the value",
    ]
    lines, records, output = (
        tmp_path / "texts.txt",
        tmp_path / "texts.jsonl.zst",
        tmp_path / "out.jsonl",
    )
    lines.write_text("".join(f"{text}\n" for text in texts))
    rows = "".join(json.dumps({"source": text, "target": "x"}) + "\r\n" for text in texts)
    records.write_bytes(zstandard.compress(rows.encode()))

    given = samestep("generate", t5_run, *OPTIONS, *texts)
    assert given.code == 0, given.err
    assert given.out.count("\n") == len(texts)
    monkeypatch.setattr("sys.stdin", io.StringIO(lines.read_text()))
    assert samestep("generate", t5_run, *OPTIONS).out == given.out
    assert (
        samestep("generate", t5_run, *OPTIONS, "--input", lines, "--batch-size", 1).out == given.out
    )
    assert samestep("generate", t5_run, *OPTIONS, "--input", records, "--output", output).out == ""
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [row["source"] for row in written] == texts
    assert [row["text"] for row in written] == given.out.splitlines()

    assert samestep("export", t5_run, tmp_path / "exported").code == 0
    assert samestep("generate", tmp_path / "exported", *OPTIONS, *texts).out == given.out
    drawn = [
        samestep("generate", t5_run, "--sample", "--seed", seed, "--max-new-tokens", 8, *texts).out
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_prompts_with_sentinels_are_read_as_transformers_reads_them(
    samestep: Samestep, t5_run: Path, tmp_path: Path
) -> None:
    """The run and its export generate what `transformers` generates from the export."""
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    prompts = [
        "<extra_id_0> of a class<extra_id_1>, the <extra_id_2>",
        "a statement  <extra_id_0>\u3000and <extra_id_999>",
    ]
    assert samestep("export", t5_run, tmp_path / "t5").code == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "t5")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "t5")
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    outputs = model.generate(**inputs, max_new_tokens=12, do_sample=False, num_beams=1)
    end = tokenizer.eos_token_id
    ours = load_weights(t5_run).load_tokenizer()
    expected = []
    for row in outputs.tolist():
        tokens = row[1:]  # the first one starts the decoder
        expected.append(ours.decode(tokens[: tokens.index(end)] if end in tokens else tokens))
    for checkpoint in (t5_run, tmp_path / "t5"):
        result = samestep("generate", checkpoint, "--max-new-tokens", 12, *prompts)
        assert result.out.splitlines() == [" ".join(text.splitlines()) for text in expected]
    assert (tmp_path / "t5" / "tokenizer.json").is_file()
    text = (tmp_path / "t5" / "README.md").read_text()
    assert "```\npip install torch transformers\n```" in text


@pytest.mark.parametrize(
    ("content", "arguments", "words"),
    [
        (
            "a\n\nb\n",
            [],
            "texts:2: empty document; correct or remove the line",
        ),
        ("a\n", ["--output", "texts"], "--output texts already exists"),
        ("a\n", ["b"], "texts and --input texts are both given"),
        ("a\n", ["--length-penalty", "2"], "length_penalty and early_stopping have no effect"),
        ("a\n", ["--beams", "many"], "beams must be a whole number, not 'many'"),
        (
            "a\n",
            ["--early-stopping", "maybe"],
            "early_stopping must be true or false or never, not 'maybe'",
        ),
        (b"\xff\n", [], "texts:1: invalid UTF-8"),
        (None, [], "cannot read texts: No such file or directory"),
        ("", [], "texts:1: empty file"),
    ],
)
def test_bad_input(
    samestep: Samestep,
    t5_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str | bytes | None,
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path("texts").write_bytes(content if isinstance(content, bytes) else content.encode())
    result = samestep("generate", t5_run, *arguments, "--input", "texts")
    assert result.code in (1, 2)
    assert result.message.startswith(words), result.message


@pytest.mark.parametrize("line", ["no JSON", '{"target": "a"}', "[1]", '{"source": ""}'])
def test_bad_json_lines(samestep: Samestep, t5_run: Path, tmp_path: Path, line: str) -> None:
    (tmp_path / "in.jsonl").write_text(f'{{"source": "a"}}\n{line}\n')
    result = samestep("generate", t5_run, "--input", tmp_path / "in.jsonl")
    assert result.code == 1
    assert "in.jsonl:2: " in result.message


def test_texts_that_are_not_utf8(
    samestep: Samestep, t5_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the byte 0xff, Python makes a surrogate in arguments and, in the C locale, in input."""
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb \udcff\n"))
    for arguments, name in (["a \udcff b"], "the texts given"), ([], "standard input"):
        result = samestep("generate", t5_run, *arguments)
        assert (result.code, f"{name} is not UTF-8" in result.message) == (1, True)
    result = samestep("generate", t5_run, "a", "--prefix", "\udcff")
    assert (result.code, "--prefix: '\\udcff' is not UTF-8" in result.message) == (2, True)


def test_a_masked_language_model_is_refused(samestep: Samestep, finished_run: Path) -> None:
    result = samestep("generate", finished_run, "a text")
    assert result.code == 2
    assert "or samestep fill" in result.message
