"""The shape of the project: no import cycle, contracts over folders, tests that mirror packages."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import pytest

from launch.job import Cluster
from samestep.config import Kinds
from trainer import accelerators, strategies
from trainer.inspect.plan.plan import STRATEGIES

ROOT = Path(__file__).parents[3]
PACKAGES = ("samestep", "trainer", "data_pipeline", "launch")
UNIT = ROOT / "tests" / "unit"
NOT_MIRRORED = {"project"}  # it is about what is in no package: docs, images, benchmarks, this tree
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
    "importlinter"
]
# Contracts may name these modules, beside folders and what lies directly in a package.
NAMED_MODULES = {
    "data_pipeline.reading.loader",  # makes batches, which only a run and what replays one may do
    "trainer.training.compose",
    "trainer.training.observers.probe_rows",  # composes its probes
}


def cycles(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """What is left of a graph without the modules that no cycle goes through."""
    left = imports
    while True:
        imported = set().union(*left.values())
        free = {module for module, of in left.items() if not of or module not in imported}
        if not free:
            return left
        left = {module: of - free for module, of in left.items() if module not in free}


def test_there_is_no_import_cycle():
    """Imports inside of functions and under TYPE_CHECKING count, too."""
    graph = grimp.build_graph(*PACKAGES, cache_dir=None)
    imports = {
        module: set(graph.find_modules_directly_imported_by(module)) for module in graph.modules
    }
    inside = "trainer.training.run"  # imported inside of a function
    assert inside in imports["trainer.elastic.cli"]
    assert cycles(imports) == {}


@pytest.mark.parametrize(
    ("imports", "expected"),
    [
        ({}, {}),
        ({"a": {"b", "c"}, "b": {"c"}, "c": set()}, {}),
        ({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}, {"b": {"c"}, "c": {"b"}}),
        ({"a": {"a"}}, {"a": {"a"}}),
    ],
)
def test_what_a_cycle_is(imports: dict[str, set[str]], expected: dict[str, set[str]]):
    assert cycles(imports) == expected


def named_by(contract: dict[str, Any]) -> Iterator[str]:
    """The modules that a contract names."""
    for container in contract.get("containers", []):
        for layer in contract["layers"]:
            yield from (
                f"{container}.{name.strip()}" for name in layer.replace(":", "|").split("|")
            )
    for key in ("protected_modules", "allowed_importers", "source_modules", "forbidden_modules"):
        yield from contract.get(key, [])


@pytest.mark.parametrize("contract", LINTER["contracts"], ids=lambda contract: contract["name"])
def test_contracts_name_folders(contract: dict[str, Any]):
    inner = {name for name in named_by(contract) if name.count(".") > 1}
    assert (
        sorted(
            name for name in inner - NAMED_MODULES if not (ROOT / name.replace(".", "/")).is_dir()
        )
        == []
    )


def imported(code: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_unit_tests_mirror_the_packages():
    """A unit test lies beside the module that it is about, and so imports something from there."""
    astray = []
    for path in sorted(UNIT.rglob("test_*.py")):
        place = path.parent.relative_to(UNIT).parts
        if place[:1] and place[0] in NOT_MIRRORED:
            continue
        room = place if place[:1] and place[0] in PACKAGES else ("trainer", *place)
        package = ".".join(room if place else (*room, path.stem.removeprefix("test_")))
        if not any(
            f"{name}.".startswith(f"{package}.")
            for name in imported(path.read_text(encoding="utf-8"))
        ):
            astray.append(f"{path.relative_to(ROOT)} imports nothing from {package}")
    assert astray == []


@pytest.mark.parametrize(
    ("package", "base"),
    [
        ("trainer.strategies.kinds", strategies.Config),
        ("trainer.accelerators.kinds", accelerators.Config),
        ("launch.kinds", Cluster),
    ],
)
def test_every_kind_extends_its_base(package: str, base: type):
    kinds = Kinds(package)
    assert len(kinds.available()) >= 4
    assert [
        kind for kind in kinds.available() if not issubclass(kinds.schema(kind, package), base)
    ] == []


def test_strategies_say_how_they_are_planned():
    kinds = Kinds("trainer.strategies.kinds")
    plans = {kind: kinds.schema(kind, "strategy")().plan for kind in kinds.available()}
    assert plans.pop("accelerate") is None  # what it is asked for may be any of the others
    assert set(plans.values()) == {"single", "ddp", "fsdp", "zero2"}
    sharded = [kinds.schema(kind, "strategy")(replicas=2).plan for kind in ("fsdp", "xla_spmd")]
    stages = [kinds.schema("deepspeed", "strategy")(stage=stage).plan for stage in (1, 2, 3)]
    assert {*plans.values(), *sharded, *stages} == set(STRATEGIES)


TOP = {
    *(".ci", ".dockerignore", ".gitignore", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"),
    *("MANIFEST.in", "Makefile", "README.md", "benchmarks", "configs", "constraints-xla.txt"),
    *("constraints.txt", "data_pipeline", "docker", "docs", "examples", "launch"),
    *("mkdocs.yml", "pyproject.toml", "samestep", "setup.py", "tests", "trainer"),
}


def test_nothing_strange_is_committed():
    """Such as a run, a wheel or a dataset that was left in the checkout."""
    if not (ROOT / ".git").exists():
        pytest.skip("no checkout of git")
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True
    )
    tracked = [Path(name) for name in listed.stdout.split("\0") if name]
    assert {path.parts[0] for path in tracked} == TOP
    sizes = {path: (ROOT / path).stat().st_size for path in tracked if (ROOT / path).is_file()}
    assert not [path for path, size in sizes.items() if size > 300_000]
