"""What the documentation says can be followed.

Links lead somewhere, and commands are ones that samestep takes.
"""

from __future__ import annotations

import pkgutil
import re
import shlex
from pathlib import Path

import pytest

from data_pipeline.building.recipe import load_recipe
from launch.submission import submit
from samestep.cli import build_parser
from samestep.config import load
from trainer.studies.study import Study
from trainer.training.experiment import Experiment

ROOT = Path(__file__).parents[3]
PAGES = [
    *ROOT.glob("*.md"),
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "studies").glob("*.md"),
]
FENCED = re.compile(r"^ *```[^`\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:^|(?<=`)|(?<=^\$ ))samestep [^`\n]*(?:[A-Z]{2}|/)[^`\n]*", re.MULTILINE)
WRONG_ON_PURPOSE = "training.step=5"


def commands(page: Path) -> list[str]:
    """The commands of a page, in blocks and within lines, that name a file or a placeholder (DIR)
    and so are whole.
    """
    return COMMAND.findall(page.read_text(encoding="utf-8").replace("\\\n", ""))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path):
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target in re.findall(r"\]\(([^)#\s]+)", prose) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def test_the_line_that_installs_pytorch_for_cpus_is_whole():
    pages = [(ROOT / "docs" / name).read_text() for name in ("install.md", "containers.md")]
    (command,) = re.findall(r"\| CPU only \| `([^`]+)`", pages[0])
    (index,) = re.findall(r"https://\S+/whl/cpu", pages[1])
    assert shlex.split(command) == ["pip", "install", "torch", "--index-url", index]


def test_every_threat_has_a_test_that_exists():
    """In a table of docs/security.md: the last column names tests, `none`, or `the same`."""
    prose = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    tables = prose.partition("### Threats on the network")[2].partition("### Fuzzing")[0]
    cells = [line.rstrip("|").rpartition("|")[2] for line in tables.splitlines() if "|" in line]
    cells = [cell.strip() for cell in cells if cell.strip() not in ("test", "---")]
    named = [re.findall(r"`([\w/.]+)::(\w+)`", cell) for cell in cells]
    assert len(named) > 30
    for cell, tests in zip(cells, named, strict=True):
        assert tests or cell in ("none: not prevented", "the same"), cell
        for file, name in tests:
            found = (ROOT / file).read_text(encoding="utf-8")
            assert re.search(rf"^def {name}\(", found, re.MULTILINE), f"{file}::{name}"


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to the headings of a page."""
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_anchors_exist(page: Path):
    prose = FENCED.sub("", page.read_text(encoding="utf-8"))
    links = re.findall(r"\]\(([^)#\s:]*)#([^)\s]+)\)", prose)
    missing = [
        f"{target}#{anchor}"
        for target, anchor in links
        if anchor not in anchors(page.parent / target if target else page)
    ]
    assert missing == []


@pytest.mark.parametrize(
    "page", [page for page in PAGES if commands(page)], ids=lambda page: page.name
)
def test_commands_are_understood(page: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page):
        arguments = shlex.split(command, comments=True)[1:]
        args, rest = build_parser(arguments[0]).parse_known_args(arguments)
        overrides = [*getattr(args, "overrides", []), *rest]
        assert all(re.match(r"[\w.]+=", override) for override in overrides), command
        if hasattr(args, "cluster"):
            if args.cluster.startswith("configs/") and args.file.startswith("configs/"):
                submit.prepare(args.cluster, args.file, overrides)
            continue
        if hasattr(args, "config"):
            if args.config.startswith("configs/"):
                load_recipe(args.config, overrides)
        elif hasattr(args, "study"):
            if args.study.startswith("configs/"):
                Study.read(args.study, overrides)
        elif (
            str(file := vars(args).get("file")).startswith("configs/")
            and WRONG_ON_PURPOSE not in overrides
        ):
            load(Experiment, file, overrides)


FOREIGN = {"run_squad.py", "utils.py"}  # the script of BERT's repository; a name that no module has
PROJECT = (
    "trainer",
    "data_pipeline",
    "launch",
    "tests",
    "docs",
    "benchmarks",
    "examples",
    "configs",
    "docker",
)


def is_path(name: str) -> bool:
    """Whether a name looks like a path of the project, without placeholders such as NAME."""
    return bool(
        re.fullmatch(rf"({'|'.join(PROJECT)})/[\w./-]*|[\w./-]+\.py", name)
        and not re.search("[A-Z]{2}", name)
    )


def exists(name: str) -> bool:
    """Whether a path, or the end of one, leads to a file or folder."""
    return (ROOT / name).exists() or any(next((ROOT / top).rglob(name), None) for top in PROJECT)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name != "CHANGELOG.md"], ids=lambda page: page.name
)
def test_files_and_modules_that_are_named_exist(page: Path):
    names = re.findall(r"`([\w./-]+)`", FENCED.sub("", page.read_text(encoding="utf-8")))
    paths = {name for name in names if is_path(name)} - FOREIGN
    assert sorted(path for path in paths if not exists(path)) == []
    for name in names:
        if re.fullmatch(r"(trainer|data_pipeline|launch)(\.\w+)+", name):
            pkgutil.resolve_name(name)


def test_commands_are_found():
    assert len(commands(ROOT / "README.md")) >= 10


def test_answers_are_two_lines_with_a_link():
    page = (ROOT / "docs" / "how_do_i.md").read_text(encoding="utf-8")
    entries = re.findall(r"^### (.*)\n\n((?:.+\n)+)", page, re.MULTILINE)
    assert len(entries) == page.count("\n### ") >= 30
    for question, answer in entries:
        assert len(answer.splitlines()) == 2, question
        assert "](" in answer, question
