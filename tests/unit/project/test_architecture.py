"""docs/architecture.md names every folder and top-level module, and nothing that is not there."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
PACKAGES = ("samestep", "trainer", "data_pipeline", "launch")
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]["contracts"]
ENTRY = re.compile(r"(?P<place>\| |: | {4})?(?P<name>[\w/]+) {2,}\S.*")

Layer = frozenset[str]
"""The modules of a layer, and among them "|" if they never import each other, ":" if they may."""


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    (text,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", PAGE, re.MULTILINE | re.DOTALL)
    return str(text)


def drawn(package: str) -> tuple[list[Layer], set[str]]:
    """The layers of a package as the page shows them, and the folders inside of folders."""
    (block,) = re.findall(r"^```text\n(.*?)^```", section(package), re.MULTILINE | re.DOTALL)
    layers: list[set[str]] = []
    folders, above = set(), ""
    for line in block.splitlines():
        entry = ENTRY.fullmatch(line)
        assert entry, f"no name and what it is: {line!r}"
        place, name = (entry["place"] or "").rstrip(" "), entry["name"]
        if entry["place"] == " " * 4:
            folders.add(f"{above}/{name}")
            continue
        above = name
        layers[len(layers) :] = [] if place else [set()]
        layers[-1] |= {name, place} - {""}
    return [frozenset(layer) for layer in layers], folders


@pytest.mark.parametrize("package", PACKAGES)
def test_layers_are_those_of_the_contract(package: str):
    (contract,) = (each for each in CONTRACTS if each.get("containers") == [package])
    assert contract["exhaustive"]  # so every folder and module of the package is in it
    enforced = [frozenset(re.findall(r"[\w|:]+", layer)) for layer in contract["layers"]]
    layers, _ = drawn(package)
    assert layers == enforced


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_and_module_has_an_entry(package: str):
    layers, folders = drawn(package)
    names = {name for layer in layers for name in layer} - {"|", ":"}
    modules = {
        path.parent.relative_to(ROOT / package) for path in (ROOT / package).rglob("__init__.py")
    }
    there = {path.as_posix() for path in modules} - {"."}
    there |= {path.stem for path in (ROOT / package).glob("*.py")} - {"__init__"}
    assert names | folders == there


def test_the_functions_of_a_step_exist():
    steps = re.findall(
        r"^\d+\. `([\w/]+\.py)`: (.*?)(?=^\d|\Z)", section("One step"), re.MULTILINE | re.DOTALL
    )
    assert len(steps) >= 5
    for file, functions in steps:
        tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
        defined = set()
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            if isinstance(node, ast.ClassDef):
                defined |= {
                    f"{node.name}.{each.name}"
                    for each in node.body
                    if isinstance(each, ast.FunctionDef)
                }
        named = set(re.findall(r"`([\w.]+)`", functions))
        assert named, f"{file}: no function"
        assert named <= defined, f"{file} has no {named - defined}"


def test_the_classes_of_the_parts_exist():
    rows = re.findall(
        r"^\| `(\w+)` \|.*\| `([\w/.]+)` \|$", section("The parts of a run"), re.MULTILINE
    )
    assert len(rows) >= 5
    for name, place in rows:
        files = [ROOT / place] if place.endswith(".py") else (ROOT / place).glob("*.py")
        assert any(
            re.search(rf"^class {name}\b", file.read_text(encoding="utf-8"), re.M) for file in files
        ), name


def test_the_modules_of_the_core_of_models_exist():
    (text,) = re.findall(r"^All models are built.*?\n\n", PAGE, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`(\w+)`", text)
    assert len(names) > 10
    folder = ROOT / "trainer" / "models"
    drawers = ("layers", "recurrent", "families", "extras", "codecs")
    there = {path.stem for name in ("", *drawers) for path in (folder / name).glob("*.py")}
    assert set(names) - there <= set(drawers)


def test_the_code_can_be_read_in_an_hour():
    page = (ROOT / "docs" / "the_hour.md").read_text(encoding="utf-8")
    files = re.findall(r"^\| `([\w/]+\.py)` \| ([^|\n]+) \|$", page, re.MULTILINE)
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file, _ in files}
    assert len(files) == 14
    assert sum(text.count("\n") for text in texts.values()) <= 3500
    for file, said in files:
        for name in re.findall(r"`(\w+(?:\.\w+)*)`", said.partition(";")[0]):
            assert re.search(rf"(def|class) {name.split('.')[-1]}\b", texts[file]), (file, name)
    folders = re.findall(r"`([\w/]+/)`", page)
    assert folders
    assert all((ROOT / folder).is_dir() for folder in folders)
