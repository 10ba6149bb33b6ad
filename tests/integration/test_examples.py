"""The scripts and the notebook in examples/, and the code of docs/library.md, run as they are."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import samestep
from tests.conftest import VOCAB_SIZE
from tests.integration.commands import Samestep, losses

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
PAGE = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")
SMALL = (
    f"model.vocab_size={VOCAB_SIZE}",
    "model.embedding_width=16",
    "model.width=32",
    "model.ffn_width=64",
    "data.sequence_length=32",
    "training.steps=4",
    "schedule.warmup_steps=1",
    "training.log_every=1",
    "accelerator=cpu",
)


def example(name: str) -> ModuleType:
    """A script of examples/, imported."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a command in an empty folder, with this checkout's packages."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(argument) for argument in arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
        )

    return run


def test_ranks_stream_the_batches_of_a_run(
    experiment_file: str, capsys: pytest.CaptureFixture[str]
):
    def examples(*arguments: str) -> dict[int, set[str]]:
        assert example("stream_batches").main([experiment_file, *arguments]) == 0
        found: dict[int, set[str]] = {}
        for step, numbers in re.findall(r"step (\d+): examples \[(.*?)\]", capsys.readouterr().out):
            found.setdefault(int(step), set()).update(numbers.split(", "))
        return found

    whole = examples()
    assert list(whole) == [1, 2, 3]
    assert all(len(numbers) == 10 for numbers in whole.values())
    shares = [examples("--rank", str(rank), "--world-size", "3") for rank in range(3)]
    assert {step: set().union(*(share[step] for share in shares)) for step in whole} == whole
    assert sum(len(share[1]) for share in shares) == 10
    assert examples("--start-step", "2", "--steps", "1") == {3: whole[3]}


SHORT = ("training.steps=8", "checkpoint.every=3", "data.threads=0")


@pytest.fixture(scope="module")
def own_loop(experiment_file: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output of an own loop that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("own_loop") / "run"
    assert example("own_loop").main([experiment_file, *SHORT, f"output={folder}"]) == 0
    return folder


def test_an_own_loop_resumes_to_the_last_bit(experiment_file: str, own_loop: Path, tmp_path: Path):
    run = tmp_path / "run"
    shutil.copytree(own_loop, run)
    assert list(losses(own_loop)) == list(range(1, 9))
    assert sorted(path.name[-1] for path in run.glob("checkpoints/step-*")) == ["6", "8"]
    arguments = [experiment_file, *SHORT, f"output={run}"]
    assert example("own_loop").main(arguments) == 0  # nothing is left to do
    assert losses(run) == losses(own_loop)
    shutil.rmtree(run / "checkpoints" / "step-00000008")
    assert example("own_loop").main(arguments) == 0
    assert losses(run) == losses(own_loop)
    samestep.load_model(run).fill("a [MASK]")  # its checkpoints are those of a run
    samestep.export(str(run), str(tmp_path / "exported"))
    assert "| steps | 8 of 8 |" in (tmp_path / "exported" / "README.md").read_text()


@pytest.mark.long
def test_a_killed_own_loop_resumes_on_two_ranks(
    experiment_file: str,
    own_loop: Path,
    tmp_path: Path,
    command: Callable[..., subprocess.CompletedProcess[str]],
):
    run, path = tmp_path / "run", EXAMPLES / "own_loop.py"
    # Killed in step 5: the process ends between two statements, without a last checkpoint.
    script = (
        "import os, sys, runpy, samestep\n"
        "taken, accumulate = [], samestep.accumulate_gradients\n"
        "def kill(*arguments):\n"
        "    taken.append(1)\n"
        "    if len(taken) == 5:\n"
        "        os.kill(os.getpid(), 9)\n"
        "    return accumulate(*arguments)\n"
        "samestep.accumulate_gradients = kill\n"
        "runpy.run_path(sys.argv.pop(1), run_name='__main__')\n"
    )
    arguments = (path, experiment_file, *SHORT, f"output={run}", "checkpoint.asynchronous=false")
    ended = command(sys.executable, "-c", script, *arguments)
    assert ended.returncode == -9, ended.stderr
    assert list(losses(run)) == [1, 2, 3, 4]
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone")
    ended = command(*torchrun, "--nproc-per-node", 2, *arguments)
    assert ended.returncode == 0, ended.stderr
    assert losses(run) == pytest.approx(losses(own_loop), rel=1e-5)


def test_a_plain_sgd_loop_resumes(experiment_file: str, tmp_path: Path):
    """An optimizer without any state."""
    import torch

    def losses_of(steps: int) -> list[float]:
        overrides = [f"output={tmp_path}/sgd", "training.steps=4", "data.threads=0"]
        experiment, found = samestep.load_experiment(experiment_file, overrides), []
        with samestep.open_parts(
            experiment, lambda named: torch.optim.SGD([each for _, each in named], lr=0.1)
        ) as parts:
            for _, micro_batches in zip(range(steps), parts.batches, strict=False):
                metrics = samestep.accumulate_gradients(
                    parts.model, parts.batches.objective, parts.strategy, micro_batches
                )
                parts.strategy.step(parts.optimizer, parts.strategy.clip_grad_norm(None))
                parts.optimizer.zero_grad()
                found.append(samestep.means(metrics, parts.strategy)["loss"])
                parts.checkpoints.save({"losses": found})
            return [*parts.checkpoints.notes.get("losses", []), *found]

    assert len(losses_of(2)) == 2
    resumed = losses_of(4)
    shutil.rmtree(tmp_path / "sgd")
    assert losses_of(4) == resumed


def test_a_run_and_its_export_say_the_same(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    samestep.export(str(finished_run), str(tmp_path / "exported"))
    texts = ["return a list of [MASK] in the directory.", "a [MASK] and a [MASK]"]
    said = []
    for path in (finished_run, tmp_path / "exported"):
        capsys.readouterr()
        assert example("use_model").main([str(path), *texts]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert said[0].count("(0.") == 9
    assert "similarity: [[1.0, " in said[0]


def test_wrong_input_to_a_model(finished_run: Path, experiment_file: str):
    trained = samestep.load_model(finished_run)
    with pytest.raises(samestep.ConfigError, match=r"texts is the single text 'one'"):
        trained.encode("one")
    with pytest.raises(samestep.ConfigError, match="layer is 9, and the model has layers 1 to 2"):
        trained.encode(["one"], layer=9)
    with pytest.raises(samestep.ConfigError, match=rf"top is {VOCAB_SIZE + 1}"):
        trained.fill("[MASK]", top=VOCAB_SIZE + 1)
    assert trained.encode([]) == []
    with pytest.raises(samestep.CheckpointError, match="nowhere"):
        samestep.load_model("nowhere")
    with pytest.raises(samestep.DataError, match=r"nowhere has no metrics\.jsonl"):
        samestep.read_metrics("nowhere")
    experiment = samestep.load_experiment(experiment_file)
    with pytest.raises(samestep.ConfigError, match="rank is 2 and world_size is 2"):
        samestep.open_batches(experiment, 2, 2)
    with pytest.raises(samestep.ConfigError, match=r"start_step is 13, and training\.steps is 12"):
        samestep.open_batches(experiment, start_step=13)


@pytest.mark.long
def test_an_own_package_is_found_where_it_is_installed(
    dataset_folder: Path,
    tmp_path: Path,
    command: Callable[..., subprocess.CompletedProcess[str]],
):
    """Installed as a user would, in an environment that also sees this one's packages."""
    shutil.copytree(
        EXAMPLES / "own_package",
        tmp_path / "own_package",
        ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"),
    )
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "parent.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "venv" / "bin" / "python"
    train = (
        *(python, "-m", "samestep.cli", "train", tmp_path / "own_package" / "recipe.yaml"),
        *(f"data.path={dataset_folder}", f"output={tmp_path}/run", *SMALL),
    )
    refused = command(*train)
    assert refused.returncode == 2, refused.stderr
    assert "the package my_package is not installed. Install it (pip install -e" in refused.stderr
    installed = command(
        *(python, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--no-index", "-e", tmp_path / "own_package"),
    )
    assert installed.returncode == 0, installed.stderr
    trained = command(*train, "--processes", 2)
    assert trained.returncode == 0, trained.stderr
    rows = samestep.read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows if "train/loss" in row] == [1, 2, 3, 4]


@pytest.mark.long
def test_an_own_package_is_found_in_the_current_folder(
    dataset_folder: Path,
    tmp_path: Path,
    samestep: Samestep,
    monkeypatch: pytest.MonkeyPatch,
):
    """The same losses on one process and on three."""
    monkeypatch.chdir(EXAMPLES / "own_package")
    monkeypatch.setattr(sys, "path", sys.path[:])
    found = []
    for processes in (1, 3):
        run = tmp_path / f"run-{processes}"
        result = samestep(
            *("train", "recipe.yaml", "--processes", processes, f"data.path={dataset_folder}"),
            *(f"output={run}", *SMALL),
        )
        assert result.code == 0, result.err
        found.append(losses(run))
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    for name in [name for name in sys.modules if name.partition(".")[0] == "my_package"]:
        del sys.modules[name]


@pytest.mark.long
def test_the_notebook_goes_from_text_to_a_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(EXAMPLES / "text_to_plot.ipynb", as_version=4)
    assert len(notebook.cells) <= 20
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)  # stored without them
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    NotebookClient(notebook, timeout=200, resources={"metadata": {"path": str(tmp_path)}}).execute()
    plots = [
        output for cell in code for output in cell.outputs if "image/png" in output.get("data", {})
    ]
    assert len(plots) == 1
    rows = samestep.read_metrics(tmp_path / "text_to_plot" / "run")
    train = [row["train/loss"] for row in rows if "train/loss" in row]
    assert train[-1] < train[0] - 1


@pytest.mark.long
def test_the_code_of_the_page_runs(
    experiment_file: str,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    """The page names `experiment.yaml` and `runs/first`, which are there."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    # test_own_classifier.py predicts as the page does, with a run that is fine-tuned.
    blocks = [block for block in blocks if ".predict(" not in block]
    assert len(blocks) == 4
    monkeypatch.chdir(tmp_path)
    (tmp_path / "experiment.yaml").write_text(
        Path(experiment_file).read_text(encoding="utf-8").replace("set-by-the-test", "runs/mine"),
        encoding="utf-8",
    )
    shutil.copytree(finished_run, tmp_path / "runs" / "first")
    for number, block in enumerate(blocks):
        script = tmp_path / f"block_{number}.py"
        script.write_text(block, encoding="utf-8")
        runpy.run_path(str(script))


def test_the_page_names_examples_and_names_that_exist():
    for path in re.findall(r"\]\(\.\./(examples/[^)]*)\)", PAGE):
        assert (ROOT / path).exists(), path
    named = set(re.findall(r"samestep\.([A-Za-z_]\w*)", PAGE))
    assert named <= set(samestep.__all__)
    for script in ("stream_batches.py", "use_model.py", "own_loop.py", "own_package"):
        assert f"](../examples/{script})" in PAGE


def test_merges_of_byte_pair_encoding(capsys: pytest.CaptureFixture[str]):
    """The words of Sennrich et al. (2016, algorithm 1), counted on paper."""
    module = example("bpe_merges")
    assert module.main([]) == 0
    found = [(m.pair, m.times) for m in module.counted({"low": 5, "lower": 2, "newest": 6}, 2)]
    assert found == [(("w", "e"), 8), (("l", "o"), 7)]
    printed = capsys.readouterr().out
    merges = re.findall(r"^ +\d+ (\S+) \+ (\S+) +(\d+) times", printed, re.MULTILINE)
    assert merges[:5] == [
        ("e", "s", "9"),
        ("t", "·", "9"),
        ("es", "t·", "9"),
        ("l", "o", "7"),
        ("lo", "w", "7"),
    ]
    assert (
        "  1 e + s          9 times   l o w ·  l o w e r ·  n e w es t ·  w i d es t ·" in printed
    )
    assert "(as often: s t, t ·)" in printed
    assert printed.endswith("lowest: low est·\nnewer: new e r ·\n")


def test_merges_by_hand_are_those_of_tokenizers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    module = example("bpe_merges")
    for words in (["aaa:3", "abab:5", "banana:2"], ["x:1"], ["ab:1", "abc:1", "cab:1", "aab:1"]):
        assert module.main([*words, "--merges", "30"]) == 0
    trained = module.trained
    monkeypatch.setattr(module, "trained", lambda words, merges: trained({"newest": 1}, merges))
    assert module.main(["low:5", "--encode"]) == 1
    assert "tokenizers has other merges" in capsys.readouterr().out
