"""What bad input gets: one paragraph that names the thing and the fix, an exit code, and no stack
trace.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from data_pipeline.format.manifest import Manifest
from data_pipeline.tokenizers.tokenizer import Tokenizer
from tests.integration.commands import Samestep


@pytest.fixture
def dataset_copy(dataset_folder: Path, tmp_path: Path) -> Path:
    """A dataset to damage."""
    return Path(shutil.copytree(dataset_folder, tmp_path / "dataset"))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"mounting a small file system needs root: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("optimzer.lr=1", 2, ["optimzer", "did you mean 'optimizer'"]),
        ("optimizer.lr", 2, ["optimizer.lr", "key=value"]),
        ("optimizer.lr=fast", 2, ["optimizer.lr must be a number", "'fast'"]),
        ("training.steps=3", 2, ["warmup_steps 4 is more than the 3 steps"]),
        ("training.steps=0", 2, ["training: steps must be at least 1"]),
        ("objective=mlmm", 2, ["objective.kind", "'mlmm'", "did you mean 'mlm'"]),
        (
            "model.vocab_size=100",
            2,
            ["vocabulary of 600", "model.vocab_size is 100", "600 or more"],
        ),
        (
            "data.sequence_length=33",
            2,
            ["data.sequence_length 33", "position table of 32", "model.max_positions to 33"],
        ),
        (
            "phases=[{steps: 8}, {steps: 4, sequence_length: 64}]",
            2,
            ["phases.1.sequence_length 64", "position table of 32", "model.max_positions to 64"],
        ),
        ("phases=[{steps: 8}]", 2, ["8 steps together", "set training.steps to 8"]),
        (
            "objective=causal_lm",
            2,
            ["needs next_tokens, and the model, bert, offers", "set model.causal=true"],
        ),
        ("data.sequence_length=2", 2, ["sequence_length is 2", "Use 3 ("]),
        ("data.lanes=100000", 2, ["data.lanes is 100000", "set data.lanes to at most"]),
        (
            "data.path=nowhere",
            1,
            [
                "nowhere holds no finished dataset: there is no folder /",
                "/nowhere. Correct data.path, or build it with: samestep data build",
            ],
        ),
        # Before the packing and the head, which do not matter for a dataset without labels.
        (
            "objective=classification",
            1,
            ["objective reads rows for classification", "documents without labels", "as mlm"],
        ),
        ("init_from=nowhere", 1, ["nowhere is neither a run", "nor a Hugging Face folder"]),
        ("accelerator=cuda", 2, ["torch finds no GPU", "accelerator=cpu"]),
    ],
)
def test_wrong_settings(
    samestep: Samestep,
    experiment_file: str,
    tmp_path: Path,
    override: str,
    code: int,
    words: list[str],
) -> None:
    if override == "accelerator=cuda" and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", override)
    assert result.code == code
    assert all(word in result.message for word in words), result.message
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_missing_file(samestep: Samestep, tmp_path: Path) -> None:
    result = samestep("train", tmp_path / "absent.yaml")
    assert result.code == 2
    assert (
        result.message
        == f"cannot read the configuration {tmp_path}/absent.yaml: No such file or directory"
    )


@pytest.mark.parametrize("command", ["evaluate", "export", "fill"])
def test_no_run(samestep: Samestep, tmp_path: Path, command: str) -> None:
    more = {"evaluate": [], "export": [tmp_path / "out"], "fill": ["a [MASK]"]}[command]
    result = samestep(command, tmp_path / "absent", *more)
    assert result.code in (1, 2)
    verb = "is not" if command == "evaluate" else "is neither"
    assert f"{tmp_path / 'absent'} {verb} a run" in result.message


@pytest.mark.parametrize("option", [("--limit", 3), ("--metrics", "bleu"), ("--pairs", "a.jsonl")])
def test_options_of_generated_texts(
    samestep: Samestep, finished_run: Path, option: tuple[object, ...]
) -> None:
    result = samestep("evaluate", finished_run, *option)
    assert result.code == 2
    assert result.message == (f"{option[0]} needs --generate. Add it, or leave {option[0]} out.")


def test_traceback_on_demand(samestep: Samestep, experiment_file: str, tmp_path: Path) -> None:
    """--traceback, before the command or after it, shows the stack besides the paragraph."""
    for arguments in (
        ["--traceback", "config", "absent.yaml"],
        ["config", "absent.yaml", "--traceback"],
    ):
        result = samestep(*arguments)
        assert result.code == 2
        assert "error: cannot read the configuration" in result.err
        assert "Traceback" in result.err


def test_missing_shard(
    samestep: Samestep, experiment_file: str, dataset_copy: Path, tmp_path: Path
) -> None:
    (dataset_copy / "train-000002.tar").unlink()
    result = samestep(
        "train", experiment_file, f"output={tmp_path / 'run'}", f"data.path={dataset_copy}"
    )
    assert result.code == 1
    assert "train-000002.tar is missing" in result.message
    assert "samestep data verify" in result.message


@pytest.mark.parametrize("threads", [0, 2])
def test_corrupt_shard(
    samestep: Samestep, experiment_file: str, dataset_copy: Path, tmp_path: Path, threads: int
) -> None:
    """Damage that leaves the size as it was is noticed at the latest when the tokens are read, in
    any thread.
    """
    shard = dataset_copy / "train-000001.tar"
    content = bytearray(shard.read_bytes())
    content[4096:20480] = b"\xff" * 16384
    shard.write_bytes(content)
    run = tmp_path / "run"
    result = samestep(
        "train",
        experiment_file,
        f"output={run}",
        f"data.path={dataset_copy}",
        f"data.threads={threads}",
    )
    assert result.code == 1
    assert "train-000001.tar" in result.message
    assert "samestep data verify" in result.message


def test_another_tokenizer(
    samestep: Samestep, experiment_file: str, finished_run: Path, dataset_copy: Path, tmp_path: Path
) -> None:
    """Neither tokens that the tokenizer beside them did not make, nor weights that know other
    tokens, are used.
    """
    file = dataset_copy / "tokenizer" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = list(vocabulary)[-2:]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    file.write_text(json.dumps(tokenizer))
    result = samestep(
        "train", experiment_file, f"output={tmp_path / 'run'}", f"data.path={dataset_copy}"
    )
    assert result.code == 1
    assert "but the dataset was built with" in result.message

    fingerprint = Tokenizer.load(dataset_copy / "tokenizer").fingerprint
    manifest = Manifest.load(dataset_copy)
    dataclasses.replace(manifest, tokenizer_fingerprint=fingerprint).save(dataset_copy)
    for command in (
        ["evaluate", finished_run],
        ["train", experiment_file, f"output={tmp_path / 'run'}", f"init_from={finished_run}"],
    ):
        result = samestep(*command, f"data.path={dataset_copy}")
        assert result.code == 2
        assert "was trained with another tokenizer" in result.message
        assert f"tokenizer.path={finished_run / 'tokenizer'}" in result.message


def test_empty_heldout_split_is_refused_before_training(
    samestep: Samestep, experiment_file: str, dataset_copy: Path, tmp_path: Path
) -> None:
    manifest = Manifest.load(dataset_copy)
    splits = {**manifest.splits, "heldout": ()}
    dataclasses.replace(manifest, splits=splits).save(dataset_copy)
    overrides = [f"output={tmp_path / 'run'}", f"data.path={dataset_copy}"]
    result = samestep("train", experiment_file, *overrides, "training.evaluate_every=5")
    assert result.code == 1
    assert "heldout split" in result.message
    assert "step 1/" not in result.err
    assert samestep("train", experiment_file, *overrides, "training.steps=4").code == 0


def test_a_refused_start_leaves_no_folder(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    output = tmp_path / "run"
    result = samestep("train", experiment_file, f"output={output}", "data.path=nowhere")
    assert result.code == 1
    assert not output.exists()


def test_an_own_module_that_fails_is_named(
    samestep: Samestep, experiment_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "faulty_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "raising.py").write_text("\nraise RuntimeError('boom')\n")
    (package / "torn.py").write_text("def broken(:\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, reason, line in (("raising", "RuntimeError: boom", 2), ("torn", "SyntaxError", 1)):
        kind = f"faulty_package.{name}"
        result = samestep("config", experiment_file, f"objective.kind={kind}")
        assert result.code == 2
        assert f"objective.kind: {kind} cannot be imported: {reason}" in result.message
        assert f"{name}.py, line {line}" in result.message


def test_checkpoint_of_another_model(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """A run is not continued with another model, nor started from another one's weights.

    Its checkpoint stays.
    """
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    result = samestep(
        "train", experiment_file, f"output={run}", "model.width=64", "training.steps=13"
    )
    assert result.code == 2
    assert "the checkpoint is of another model (model.width: 32 -> 64" in result.message
    assert "another output" in result.message
    result = samestep(
        "train",
        experiment_file,
        f"output={tmp_path / 'new'}",
        "model.layers=3",
        f"init_from={finished_run}",
    )
    assert result.code == 1
    assert "holds another model" in result.message
    assert "layers.2" in result.message
    assert "set model.layers=2 as it was there" in result.message
    other = samestep(
        "train",
        experiment_file,
        f"output={tmp_path / 'new'}",
        "model={kind: gpt2, vocab_size: 600, layers: 2, width: 32, heads: 2, ffn_width: 64, "
        "max_positions: 32}",
        "objective.kind=causal_lm",
        f"init_from={finished_run}",
    )
    assert "set model.kind=bert as it was there" in other.message
    assert samestep("evaluate", run).code == 0


def test_run_of_another_dataset_or_seed(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    result = samestep("train", experiment_file, f"output={run}", "seed=5", "training.steps=13")
    assert result.code == 1
    fix = "its seed is 0, but this run's is 5. To continue, set seed to the checkpoint's"
    assert fix in result.message


def test_damaged_checkpoints(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """The newest sound checkpoint is taken; with none, the run is not silently started anew."""
    run = Path(shutil.copytree(finished_run, tmp_path / "run"))
    for number, step in enumerate((12, 8)):
        file = run / "checkpoints" / f"step-{step:08d}" / "rank-00000.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        result = samestep("evaluate", run)
        assert f"skipping the checkpoint of step {step}" in result.err
        assert result.code == number
    assert "all 2 checkpoints" in result.message
    assert samestep("train", experiment_file, f"output={run}").code == 1


def test_output_that_cannot_be_written(
    samestep: Samestep, experiment_file: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    for output in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        result = samestep("train", experiment_file, f"output={output}")
        assert result.code == 1
        needed = f"cannot write in {output}/checkpoints, which output={output} needs: "
        assert needed in result.message
        assert "or choose another output" in result.message
    elsewhere = f"checkpoint.folder={tmp_path}/file/kept"
    result = samestep("train", experiment_file, f"output={tmp_path / 'run'}", elsewhere)
    assert f"which {elsewhere} needs: Not a directory" in result.message


def test_a_text_corpus_under_the_objective_of_a_task_with_weights(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    """Where the head would be built for the labels, there are none."""
    settings = [f"output={tmp_path / 'run'}", f"init_from={finished_run}", "model=null"]
    result = samestep("train", experiment_file, *settings, "objective=classification")
    assert result.code == 1
    assert "the objective reads rows for classification" in result.message
    assert "holds documents without labels" in result.message


def test_a_corpus_of_one_document(
    samestep: Samestep, experiment_file: str, dataset_folder: Path, tmp_path: Path
) -> None:
    text, data = tmp_path / "one.txt", tmp_path / "one"
    text.write_text("the class of a file is an object with a name " * 40)
    tree = {"source": {"kind": "text", "paths": [str(text)]}, "output": str(data)}
    tree["tokenizer"] = {"path": str(dataset_folder / "tokenizer")}
    file = tmp_path / "one.json"
    file.write_text(json.dumps(tree))
    built = samestep("data", "build", file)
    assert built.code == 0, built.err
    assert "none" not in built.err
    assert "The source has only one: to evaluate, split the text into several" in built.err
    run = ["train", experiment_file, f"output={tmp_path / 'run'}", f"data.path={data}"]
    result = samestep(*run, "data.lanes=2", "training.evaluate_every=4")
    assert result.code == 1
    assert "Set training.evaluate_every to null, or split the text" in result.message
    assert samestep(*run, "data.lanes=2", "training.steps=2", "schedule.warmup_steps=1").code == 0
    held_out = samestep("data", "build", file, "heldout_fraction=0.999", f"output={data}2")
    assert "Its only document was held out, by heldout_fraction; lower it" in held_out.message
    by_paragraph = "source.document=paragraph"
    text.write_text("\n\n".join(f"a class of number {n} " * 9 for n in range(60)))
    again = samestep("data", "build", file, by_paragraph, f"output={data}3", "heldout_fraction=0.2")
    assert again.code == 0
    assert "held out" not in again.err


def test_a_run_continued_with_another_strategy_names_only_the_kind(
    samestep: Samestep, experiment_file: str, finished_run: Path, tmp_path: Path
) -> None:
    run = shutil.copytree(finished_run, tmp_path / "run")
    more = ["training.steps=14", "strategy=ddp"]
    result = samestep("train", experiment_file, f"output={run}", *more)
    assert result.code == 0, result.err
    (line,) = (line for line in result.err.splitlines() if "continuing  " in line)
    assert "strategy.kind: fsdp -> ddp" in line
    assert "strategy.replicas" not in line
    assert "strategy.bucket_mb" not in line
    assert "training.steps: 12 -> 14" in line


@pytest.mark.long
@pytest.mark.parametrize("asynchronous", [True, False])
def test_full_disk(
    samestep: Samestep, experiment_file: str, small_disk: Path, asynchronous: bool
) -> None:
    """A checkpoint for which there is no room is an error, and the one before it stays readable."""
    run = small_disk / "run"
    overrides = [
        f"output={run}",
        "checkpoint.every=4",
        f"checkpoint.asynchronous={str(asynchronous).lower()}",
    ]
    assert samestep("train", experiment_file, *overrides, "training.steps=4").code == 0
    result = samestep("train", experiment_file, *overrides, "training.steps=12")
    assert result.code == 1
    assert "No space left on device" in result.message
    assert "step         4" in samestep("evaluate", run).out


def test_full_disk_for_metrics(samestep: Samestep, experiment_file: str, small_disk: Path) -> None:
    run = small_disk / "run"
    run.mkdir()
    (small_disk / "filler").write_bytes(bytes(2**20 - 2**16))
    result = samestep("train", experiment_file, f"output={run}")
    assert result.code == 1
    assert "No space left on device" in result.message


def test_exported_folder_is_not_overwritten(
    samestep: Samestep, finished_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").write_text("precious")
    result = samestep("export", finished_run, tmp_path)
    assert result.code == 1
    assert f"{tmp_path} already exists" in result.message
    assert (tmp_path / "mine").read_text() == "precious"


def test_texts_that_cannot_be_filled(samestep: Samestep, finished_run: Path) -> None:
    for text, words in (("no mask", "write [MASK]"), ("[MASK] " + "long " * 50, "shorten it")):
        result = samestep("fill", finished_run, text)
        assert result.code == 2
        assert words in result.message
