"""Configuration files: mistakes are rejected by name; valid files survive a round trip."""

from __future__ import annotations

import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

import pytest

from samestep.config import Kinds, decode, differences, dump, load, read_tree, to_tree
from samestep.config.tree import Tree, merge, merge_overrides
from samestep.errors import ConfigError


@dataclass(frozen=True)
class Inner:
    rate: float = 1.0
    names: tuple[str, ...] = ()
    limit: int | None = None
    size: int | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if self.rate < 0:
            raise ConfigError(f"rate must not be negative, it is {self.rate}")


class Schedule(Protocol):
    def fraction(self, step: int) -> float: ...


@dataclass(frozen=True)
class Root:
    steps: int
    kind: Literal["linear", "cosine"] = "linear"
    inner: Inner = field(default_factory=Inner)
    table: dict[str, int] = field(default_factory=dict)
    optimizer: Annotated[Any, Kinds("trainer.optim.kinds")] | None = None


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


def test_values_decode_by_declared_type(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "steps: 1e3\ninner: {rate: 1e-4, names: [a, b]}\ntable: {x: 1}\n"
    )
    root = load(Root, path)
    assert root == Root(1000, inner=Inner(1e-4, ("a", "b")), table={"x": 1})
    assert isinstance(root.steps, int)


@pytest.mark.parametrize(
    "text",
    [
        "steps: !!python/object/apply:os.system ['touch touched']",
        "steps: !!python/name:os.system",
        "steps: !!python/object/new:os.system ['touch touched']",
    ],
)
def test_no_tag_makes_an_object(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"a\.yaml is not valid YAML: could not determine"):
        load(Root, write(tmp_path, "a.yaml", text))
    with pytest.raises(ConfigError, match="could not determine"):
        load(Root, write(tmp_path, "a.yaml", "steps: 1"), [text.replace(": ", "=", 1)])
    assert not (tmp_path / "touched").exists()


def test_a_small_file_cannot_stand_for_a_large_one(tmp_path: Path) -> None:
    lists = ["- &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lists += [f"- &a{i + 1} [{', '.join(10 * [f'*a{i}'])}]" for i in range(9)]
    texts = {
        "aliases": "\n".join(lists),
        "cycle": "steps: &a [*a]",
        "brackets": "steps: " + 10_000 * "[",
    }
    for name, text in texts.items():
        with pytest.raises(ConfigError, match=f"{name} is not valid YAML: it"):
            load(Root, write(tmp_path, name, text))
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(50_000)  # as some libraries do
    try:
        for each in ("[", "- ", "? ", "{a: "):
            with pytest.raises(ConfigError, match="nested in more than 100 levels"):
                load(Root, write(tmp_path, "deep", 1000 * each))
    finally:
        sys.setrecursionlimit(limit)
    nested = "table: " + 90 * "[" + 90 * "]" + "\nsteps: 1\ninner: {names: [a], limit: 1}"
    assert read_tree(write(tmp_path, "nested", nested))["steps"] == 1
    shared = "table: &a {x: 1}\nsteps: 1\ninner: {names: &b [a], limit: 1}"
    assert load(Root, write(tmp_path, "few", shared)).table == {"x": 1}


def test_override_beats_file_beats_base_beats_default(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "steps: 1\ninner: {rate: 2, limit: 5}\n")
    path = write(tmp_path, "a.yaml", "base: base.yaml\nsteps: 2\ninner: {rate: 3}\n")
    assert load(Root, path).inner == Inner(3.0, limit=5)
    assert load(Root, path, ["inner.rate=4", "inner.limit=null"]) == Root(2, inner=Inner(4.0))


def test_one_dataset_and_several_replace_each_other() -> None:
    several: Tree = {"data": {"lanes": 4, "sources": [{"path": "a"}], "weights": [{"step": 1}]}}
    one = merge(several, {"data": {"path": "b"}})
    assert one == {"data": {"lanes": 4, "path": "b"}}
    again = merge(one, {"data": {"sources": [{"path": "c"}]}})
    assert again == {"data": {"lanes": 4, "sources": [{"path": "c"}]}}
    # No dataset is chosen here, and of a list of sources one is changed.
    assert merge(several, {"data": {"path": None}})["data"]["sources"] == [{"path": "a"}]
    changed = merge(several, {"data": {"sources": {"0": {"path": "d"}}}})
    assert changed["data"]["sources"] == [{"path": "d"}]
    assert merge_overrides(several, ["data.path=b"])["data"] == one["data"]
    with pytest.raises(ConfigError, match=r"data\.path=b comes after data\.sources and drops it"):
        merge_overrides(one, ["data.sources=[{path: a}]", "data.path=b"])
    given = ["data.sources=[]", "data.weights=[]", "data.path=b"]  # nothing is lost
    assert merge_overrides(several, given)["data"] == one["data"]


def test_merge_keys_share_settings_within_a_file(tmp_path: Path) -> None:
    text = """
phases:
- {optimizer: &second {<<: &first {kind: adamw, lr: 1, eps: 2}, lr: 3}}
optimizer: {<<: *second, eps: 4}
inner: {<<: [&a {rate: 5, limit: 6}, {limit: 7, size: 8}], size: 9}
"""
    first, second = {"kind": "adamw", "lr": 3, "eps": 2}, {"kind": "adamw", "lr": 3, "eps": 4}
    assert read_tree(write(tmp_path, "a.yaml", text)) == {
        "phases": [{"optimizer": first}],
        "optimizer": second,
        "inner": {"rate": 5, "limit": 6, "size": 9},
    }


@pytest.mark.parametrize("name", ["2024-12-01", "2024-13-01", "2024-05-01 10:00:00"])
def test_a_date_is_text(tmp_path: Path, name: str) -> None:
    path = write(tmp_path, "a.yaml", f"inner: {{names: [{name}]}}\n")
    tree = read_tree(path, [f"output={name}"])
    assert tree == {"inner": {"names": [name]}, "output": name}


def test_an_override_reaches_an_item_of_a_list_by_its_number(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "phases: [{steps: 1, lr: 2}, {steps: 3, lr: 4, schedule: {power: 1}}]\n"
    )
    tree = read_tree(path, ["phases.1.lr=5", "phases.1.schedule.power=2"])
    assert tree == {
        "phases": [{"steps": 1, "lr": 2}, {"steps": 3, "lr": 5, "schedule": {"power": 2}}]
    }
    for unknown in ("phases.2", "phases.lr"):
        with pytest.raises(ConfigError, match=f"{unknown} does not exist: phases has 2 items"):
            read_tree(path, [f"{unknown}=1"])


def test_section_of_another_kind_replaces_the_base_section(tmp_path: Path) -> None:
    write(tmp_path, "base.yaml", "steps: 1\noptimizer: {kind: other, momentum: 3}\n")
    path = write(tmp_path, "a.yaml", "base: base.yaml\noptimizer: {kind: adamw, lr: 0.5}\n")
    assert read_tree(path)["optimizer"] == {"kind": "adamw", "lr": 0.5}
    assert load(Root, path, ["optimizer=adamw"]) == load(Root, path)
    short = write(tmp_path, "short.yaml", "steps: 1\noptimizer: adamw\n")
    assert load(Root, short, ["optimizer.lr=0.5"]).optimizer == load(Root, path).optimizer


def test_a_later_kind_does_not_silently_drop_an_earlier_override(tmp_path: Path) -> None:
    path = write(tmp_path, "a.yaml", "optimizer: {kind: other, lr: 2}\nphases: [{steps: 1}]\n")
    wrong = {
        ("optimizer.lr=1", "optimizer.kind=adamw"): "Put optimizer.kind before optimizer.lr",
        ("optimizer.lr=1", "optimizer=adamw"): "optimizer=adamw comes after optimizer.lr and drops",
        ("phases.0.optimizer.lr=1", "phases.0.optimizer=adamw"): "phases.0.optimizer=adamw comes",
    }
    for overrides, message in wrong.items():
        with pytest.raises(ConfigError, match=message):
            read_tree(path, overrides)
    adamw = {"kind": "adamw", "lr": 1}
    for overrides, optimizer in {
        ("optimizer.kind=adamw", "optimizer.lr=1"): adamw,
        ("optimizer.lr=3", "optimizer.kind=adamw", "optimizer.lr=1"): adamw,
        ("optimizer.lr=1", "optimizer.kind=other"): {"kind": "other", "lr": 1},
        ("optimizer=lamb", "optimizer=adamw"): {"kind": "adamw"},
        ("optimizer={kind: lamb, lr: 1}", "optimizer=adamw"): {"kind": "adamw"},
        ("optimizer.eps=1", "optimizer={kind: adamw, lr: 1}"): adamw,
        ("optimizer.lr=1", "optimizer=null"): None,
    }.items():
        assert read_tree(path, overrides)["optimizer"] == optimizer


def test_round_trip_through_yaml(tmp_path: Path) -> None:
    path = write(
        tmp_path, "a.yaml", "steps: 7\nkind: cosine\noptimizer: {kind: adamw, betas: [0.5, 0.75]}\n"
    )
    root = load(Root, path)
    assert load(Root, write(tmp_path, "b.yaml", dump(root))) == root
    assert to_tree(root)["optimizer"]["kind"] == "adamw"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "steps is required"),
        ("stesp: 1", "stesp is not a known key; did you mean 'steps'"),
        ("steps: many", "steps must be a whole number, not 'many'"),
        ("steps: 1.5", "steps must be a whole number"),
        ("steps: true", "steps must be a whole number"),
        ("steps: 1\nkind: square", "kind must be one of linear, cosine, not 'square'"),
        ("steps: 1\ninner: {rate: -1}", "inner: rate must not be negative, it is -1.0"),
        ("steps: 1\ninner: {names: x}", "inner.names must be a list"),
        ("steps: 1\ninner: 3", "inner must be a section"),
        ("steps: 1\ninner: {size: big}", "inner.size must be a whole number or auto, not 'big'"),
        ("steps: 1\ntable: {a: b}", "table.a must be a whole number"),
        ("steps: 1\noptimizer: adamv", "did you mean 'adamw'"),
        ("steps: 1\noptimizer: {lr: 1}", "optimizer.kind must name one of: adafactor, adamw"),
        (
            "steps: 1\noptimizer: {kind: adamw, lrr: 1}",
            "optimizer.lrr is not a known key; did you mean 'lr'",
        ),
        ("steps: 1\nsteps: 2", "'steps' is given twice"),
        ("steps: 1\ninner: {<<: {rate: 1}, size: 1, size: 1}", "'size' is given twice"),
        ("steps: 1\ninner: {<<: 1}", "expected a mapping"),
        ("steps: 1\n? [a]\n: 1", "a list or a section stands where a key must be"),
        ("steps: !!int x", "a.yaml is not valid YAML: invalid literal for int()"),
        ("steps: [1", "not valid YAML"),
        ("- 1", "must hold `key: value` lines"),
        ("base: nowhere.yaml", "nowhere.yaml (named as base by"),
        ("base: a.yaml", "is its own base"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    path = write(tmp_path, "a.yaml", text)
    with pytest.raises(ConfigError) as caught:
        load(Root, path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "override", ["steps", "=3", "a..b=1", "steps=[1", "steps={[1]: 2}", "a={{}: 2}", "a=!!bool x"]
)
def test_bad_overrides_are_rejected(tmp_path: Path, override: str) -> None:
    with pytest.raises(ConfigError, match=r"not an override|not valid YAML"):
        load(Root, write(tmp_path, "a.yaml", "steps: 1"), [override])


def test_a_dotted_kind_is_a_users_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sgd.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True)\n"
        "class Config:\n"
        "    lr: float = 1.0\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    root = decode(Root, {"steps": 1, "optimizer": {"kind": "theirs.sgd", "lr": 2}})
    assert root.optimizer.lr == 2.0
    assert to_tree(root)["optimizer"] == {"kind": "theirs.sgd", "lr": 2.0}


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (
            "absent.mine",
            r"optimizer.kind: no module 'absent.mine': the package absent is not installed. "
            r"Install it \(pip install -e FOLDER, .*\), or start from the folder that contains "
            r"absent.$",
        ),
        ("absent.adamv", r"contains absent. samestep itself has 'adamw'.$"),
        (
            "theirs.sgdd",
            r"no module 'theirs.sgdd': the package theirs in \S*theirs has none. "
            r"Did you mean theirs.sgd\?$",
        ),
        (
            "theirs.other_things",
            r"has none. Add the module, or name one of theirs.broken, theirs.sgd.$",
        ),
        ("theirs.sgd.inner", r"the package theirs in \S*theirs has none. Did you mean theirs.sgd"),
        (
            "theirs.broken",
            r"theirs.broken imports absent_library, which is not installed. Install it, or correct",
        ),
        ("theirs.sgd", "the module theirs.sgd defines no dataclass Config"),
        (".adamw", "must name a module"),
        ("adamw.", "must name a module"),
    ],
)
def test_a_users_module_that_cannot_be_imported_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, message: str
) -> None:
    package = tmp_path / "theirs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sgd.py").write_text("")
    (package / "broken.py").write_text("import absent_library\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        decode(Root, {"steps": 1, "optimizer": {"kind": kind}})


def test_a_kind_may_be_declared_as_a_protocol() -> None:
    """The protocol is for the type checker; `kind` alone decides which class is decoded."""

    @dataclass(frozen=True)
    class Declared:
        one: Annotated[Schedule, Kinds("trainer.optim.kinds")]
        perhaps: Annotated[Schedule, Kinds("trainer.optim.kinds")] | None = None

    adamw = Kinds("trainer.optim.kinds").schema("adamw", "one")
    decoded = decode(Declared, {"one": {"kind": "adamw", "lr": 2}, "perhaps": "adamw"})
    assert decoded == Declared(adamw(lr=2.0), adamw())
    assert decode(Declared, {"one": "adamw", "perhaps": None}) == Declared(adamw())
    assert to_tree(decoded)["perhaps"]["kind"] == "adamw"
    assert decode(Declared, to_tree(decoded)) == decoded
    assert decode(Annotated[Schedule, Kinds("trainer.optim.kinds")], "adamw") == adamw()
    with pytest.raises(ConfigError, match=r"one\.kind must name one of: adafactor, adamw"):
        decode(Declared, {"one": {"lr": 1}})
    with pytest.raises(ConfigError, match=r"one is required with a kind out of: adafactor, adamw"):
        decode(Declared, {})


def test_differences_name_the_keys_that_changed() -> None:
    before = {"a": 1, "b": {"c": 2, "d": [1]}, "gone": None, "e": {"kind": "x"}}
    after = {"a": 1, "b": {"c": 3, "d": [1]}, "new": 4, "e": "x"}
    assert differences(before, before) == {}
    assert differences(before, after) == {
        "b.c": (2, 3),
        "new": (None, 4),
        "e": ({"kind": "x"}, "x"),
    }


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("tokenizer.path=~/x", "tokenizer.path"),
        ("output=~ada/x", "output"),
        ("data.path=~/x", "data.path"),
        ("data.sources=[{path: ~/x}]", "data.sources"),
        ("data.sources.0.path=~/x", "data.sources.0.path"),
        ("init_from=~/x", "init_from"),
        ("init_embeddings=~/x", "init_embeddings"),
        ("checkpoint.folder=~/x", "checkpoint.folder"),
        ("objective.teacher=~/x", "objective.teacher"),
        ("probes.a.path=~/x", "probes.a.path"),
        ("training.retrieval.path=~/x", "training.retrieval.path"),
    ],
)
def test_a_folder_is_not_named_by_the_tilde_of_a_shell(
    tmp_path: Path, text: str, setting: str
) -> None:
    file = write(tmp_path, "a.yaml", "data: {sources: [{path: x}]}")
    with pytest.raises(ConfigError, match=rf"^{re.escape(setting)} has '~.* Write the whole"):
        read_tree(file, [text])
    read_tree(file, ["source.paths=[~/x]", "data.cache=~/x", "output=a~", "labels=[~x]"])


def test_keys_are_names_with_or_without_quotes(tmp_path: Path) -> None:
    """A label 0 or no, for example, in a file and on the command line."""
    file = tmp_path / "a.yaml"
    file.write_text("weights: {0: 5, 01: 2, no: 3, 1.5: 4, null: 6, '7': 8}")
    weights = {"0": 5, "01": 2, "no": 3, "1.5": 4, "null": 6, "7": 8}
    assert read_tree(str(file), []) == {"weights": weights}
    changed = read_tree(str(file), ["weights={0: 1}", "weights.01=9"])
    assert changed == {"weights": {**weights, "0": 1, "01": 9}}
    file.write_text("weights: {0: 5, '0': 6}")
    with pytest.raises(ConfigError, match="key '0' is given twice"):
        read_tree(str(file), [])
    schema = Literal["balanced"] | dict[str, float] | None
    assert decode(schema, {"0": 5}, "weights") == {"0": 5.0}
    with pytest.raises(ConfigError, match=r"weights\.0 must be a number, not 'much'"):
        decode(schema, {"0": "much"}, "weights")
    file.write_text("weights: {spam:5}")
    with pytest.raises(ConfigError, match=r"weights\.spam:5 has no value\. Write a space: spam: 5"):
        decode(schema, read_tree(str(file), [])["weights"], "weights")
