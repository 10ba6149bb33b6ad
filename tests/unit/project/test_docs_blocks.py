"""What a reader copies from the documentation works: commands, calls and signatures.

A block of commands is labeled `bash`. Each of its commands is checked against the command's own
options, or the block says why not: ```bash title="not tested: needs a cluster".
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import inspect
import re
import shlex
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

import samestep
from samestep.cli import build_parser
from samestep.config import load
from samestep.errors import ConfigError
from trainer.strategies import Strategy
from trainer.training.experiment import Experiment
from trainer.training.own_loop import LoopCheckpoints

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
# Written by hand or by a command that labels nothing: commands are found by their first word.
UNLABELED = {ROOT / "README.md", DOCS / "lectures.md", DOCS / "studies.md"}
LABELS = {"bash", "console", "json", "python", "text", "yaml"}
BLOCK = re.compile(
    r'^ *```(?P<label>\w*)(?: title="(?P<title>[^"]*)")?\n(?P<text>.*?)^ *```$', re.M | re.S
)
SHELL = {"cd", "done", "export", "for", "mkdir", "touch", "wait"}
PROGRAM = r"(?:samestep|make|pip|\.venv/bin/\w+|python3?) "
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
INSIDE = re.compile(
    rf"\bsamestep(?:\.cli|:\w+)?(?: samestep)? "
    rf"((?:{'|'.join(PROJECT['entry-points']['samestep.commands'])}) [^'\"|;&<>]*)"
)
OURS = r"(?:samestep|trainer|data_pipeline|launch)\b"
METHODS: dict[str, type] = {
    "batches": samestep.Batches,
    "parts.checkpoints": LoopCheckpoints,
    "parts.strategy": Strategy,
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


class Block(NamedTuple):
    label: str
    title: str
    text: str


def blocks(page: Path) -> list[Block]:
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [Block(each["label"], each["title"] or "", each["text"]) for each in found]


def shell_lines(block: Block) -> list[str]:
    """The commands of a block: lines of shell, those that end with a backslash joined."""
    lines = [line.strip() for line in block.text.replace("\\\n", " ").splitlines()]
    if block.label == "console":
        return [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    if block.label != "bash" and not (not block.label and re.match(PROGRAM, lines[0])):
        return []
    return [line for line in lines if line and not line.startswith("#")]


def simple_commands(line: str) -> Iterator[list[str]]:
    """The words of each command of a line of shell."""
    words = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    words.whitespace_split = True
    command: list[str] = []
    for word in [*words, ";"]:
        if not set(word) <= set("|&;"):
            command.append(word)
        elif command:
            yield command
            command = []


def fault(words: list[str]) -> str | None:
    """Why a command cannot work, as far as that can be told without running it."""
    while words and (words[0] == "do" or re.match(r"[A-Z_]+=", words[0])):
        words = words[1:]
    if not words or words[0] in SHELL:
        return None
    program, arguments = words[0].removeprefix(".venv/bin/"), words[1:]
    if program == "samestep":
        return samestep_fault(arguments)
    if program == "make":
        return first(f"no target {name}" for name in arguments if not is_target(name))
    if program == "pip":
        extras = ",".join(re.findall(r"\[([\w,]+)\]", " ".join(arguments))).split(",")
        known = {"", *PROJECT["optional-dependencies"]}
        return first(f"no extra {name}" for name in extras if name not in known)
    if program == "python":
        return python_fault(arguments)
    if program == "sbatch":
        scripts = [name for name in arguments if not name.startswith("-")]
        return first(f"no script {name}" for name in scripts if not (ROOT / name).is_file())
    return f"{program} is unknown here: check it, or say in the block's title why it is not tested"


def first(faults: Iterable[str]) -> str | None:
    return next(iter(faults), None)


def is_target(argument: str) -> bool:
    """Whether the Makefile has a target, or uses a variable (NAME=VALUE)."""
    name, is_variable, _ = argument.partition("=")
    pattern = rf"\$\({name}\)" if is_variable else rf"^{name}:"
    return re.search(pattern, MAKEFILE, re.MULTILINE) is not None


def samestep_fault(arguments: list[str]) -> str | None:
    """Options that a command does not have; settings are checked by test_docs.py."""
    try:
        _, rest = build_parser(arguments[0]).parse_known_args(arguments)
    except SystemExit as end:
        return "samestep refuses " + shlex.join(arguments) if end.code else None  # --version
    return first(f"{each} is no option" for each in rest if not re.match(r"[\w.]+=", each))


def python_fault(arguments: list[str]) -> str | None:
    if arguments[0] == "-c":
        compile(arguments[1], "-c", "exec")
        return None
    if arguments[0] == "-m":
        name = arguments[1]
        if name == "pytest":
            return first(f"no {each}" for each in arguments[2:] if not (ROOT / each).exists())
        if (spec := importlib.util.find_spec(name)) is None or spec.origin is None:
            return f"no module {name}"
        file = Path(spec.origin)
    elif not (file := ROOT / arguments[0]).exists():
        return f"no file {arguments[0]}"
    if not file.is_relative_to(ROOT) or ".venv" in file.parts:
        return None
    options = {each.partition("=")[0] for each in arguments if each.startswith("--")}
    # Programs of one folder share some of their options.
    known = "".join(each.read_text(encoding="utf-8") for each in file.parent.glob("*.py"))
    return first(f"{each} is no option" for each in options if f'"{each}"' not in known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_is_labeled_and_every_command_checked_or_marked(page: Path):
    faults = []
    for block in blocks(page):
        if block.label not in LABELS and not (
            not block.label and (page in UNLABELED or page.parent.name == "studies")
        ):
            faults.append(f"a block is labeled {block.label!r}: {block.text[:60]!r}")
        if block.label in ("text", "") and not shell_lines(block):
            typed = re.findall(rf"^{PROGRAM}.*", block.text, re.MULTILINE)
            faults += [f"a command in a block of text: {line}" for line in typed]
        if block.title.startswith("not tested: "):
            assert block.label == "bash"
            continue
        for line in shell_lines(block):
            faults += [f"{line}: {why}" for words in simple_commands(line) if (why := fault(words))]
    assert faults == []


def test_samestep_inside_of_other_commands():
    """As in `srun ... samestep train FILE`, also where the whole command is not tested."""
    found = [
        arguments
        for page in PAGES
        for block in blocks(page)
        if block.title
        for line in shell_lines(block)
        for arguments in INSIDE.findall(line)
    ]
    assert len(found) > 10
    words = [shlex.split(arguments, comments=True) for arguments in found]
    assert [why for arguments in words if (why := samestep_fault(arguments))] == []


def test_what_a_fault_is():
    commands = {
        "samestep train FILE --precesses 2": "--precesses is no option",
        "samestep trian FILE": "samestep refuses trian FILE",
        "make tset": "no target tset",
        "make bench CROPUS=FILES": "no target CROPUS=FILES",
        "python -m benchmarks.laoder": "no module benchmarks.laoder",
        "python -m benchmarks.step --trun 1": "--trun is no option",
        "pip install '.[hf,s4]'": "no extra s4",
        "OUTPUT=runs/x sbatch --nodes=8 launch/scripts/slurm/none.sh": "no script launch",
        "for i in 1 2; do make test && kubectl apply; done": "kubectl is unknown here",
    }
    for line, expected in commands.items():
        found = [why for words in simple_commands(line) if (why := fault(words))]
        assert len(found) == 1
        assert found[0].startswith(expected)
    for line in ("samestep train FILE a.b=1 --processes 2 | tee log", "make bench CORPUS=FILES"):
        assert [fault(words) for words in simple_commands(line) if words[0] != "tee"] == [None]


# Calls and signatures.


def calls(tree: ast.AST) -> Iterator[tuple[object, ast.Call]]:
    """Calls of what a program imports from this project, with the functions or classes."""
    names: dict[str, object] = {"samestep": samestep}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and re.match(OURS, node.module or ""):
            module = importlib.import_module(str(node.module))
            names |= {alias.name: getattr(module, alias.name) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            target: object | None = None
            match node.func:
                case ast.Name(id=name):
                    target = names.get(name)
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name in names:
                    target = getattr(names[name], attribute)
            if target is not None:
                yield target, node


def bind(target: object, call: ast.Call) -> inspect.BoundArguments:
    """The parameters that a call sets; `...` stands for any.

    Raises:
        TypeError: the call does not fit the signature.
    """
    assert callable(target)
    signature = inspect.signature(target)
    keywords = {each.arg: each.value for each in call.keywords if each.arg}
    open_ended = [isinstance(each, ast.Constant) and each.value is ... for each in call.args]
    starred = any(isinstance(each, ast.Starred) for each in call.args)
    partial = starred or any(open_ended) or len(keywords) < len(call.keywords)
    arguments = [] if starred or any(open_ended) else call.args
    return (signature.bind_partial if partial else signature.bind)(*arguments, **keywords)


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page.name == "gpu.md" else ())
        for page in PAGES
        if any(each.label == "python" for each in blocks(page))
    ],
    ids=lambda page: page.name,
)
def test_python_on_the_pages_calls_what_there_is(page: Path):
    for block in blocks(page):
        if block.label == "python":
            for target, call in calls(ast.parse(block.text)):
                bind(target, call)


def signature_fault(code: str) -> str | None:
    """What is wrong with a call in prose, whose `name=value` is a default: `f(run, step=None)`."""
    for target, call in calls(ast.parse(code, mode="eval")):
        try:
            bind(target, call)
        except TypeError as error:
            return f"{code}: {error}"
        assert callable(target)
        parameters = inspect.signature(target).parameters
        for each in call.keywords:
            default = parameters[str(each.arg)].default
            if not isinstance(each.value, ast.Constant) or each.value.value != default:
                return f"{code}: the default of {each.arg} is {default}"
    return None


def test_methods_in_prose():
    """Calls such as `parts.checkpoints.save()`, of what the examples of library.md name so."""
    page = (DOCS / "library.md").read_text(encoding="utf-8")
    found = re.findall(r"`((?:batches|parts\.\w+)\.\w+\([^`.]*\))`", page)
    assert len(found) >= 4
    for code in found:
        call = ast.parse(code, mode="eval").body
        assert isinstance(call, ast.Call)
        owner, _, method = ast.unparse(call.func).rpartition(".")
        inspect.signature(getattr(METHODS[owner], method)).bind(None, *call.args)


def test_signatures_in_prose():
    codes = [
        code
        for page in PAGES
        for code in re.findall(r"`(samestep\.\w+\([^`]*\)[^`]*)`", page.read_text(encoding="utf-8"))
    ]
    assert len(codes) >= 3
    assert [why for code in codes if (why := signature_fault(code))] == []
    wrong = "samestep.load_experiment(path, elsewhere=True)"
    assert signature_fault(wrong) == f"{wrong}: the default of elsewhere is False"
    assert "too many positional" in str(signature_fault("samestep.train(experiment, 3)"))
    assert "missing a required argument" in str(signature_fault("samestep.export(run)"))


def test_outputs_are_of_the_commands_above_them():
    """Those of `make demo`: the step, the number of rows, and what its recipe consumes."""
    command, output, *_ = (block.text for block in blocks(DOCS / "faults.md")[2:])
    ((step, rows),) = re.findall(r"replay demo/run (\d+) --top (\d+)", command)
    assert output.startswith(f"step {step}: ")
    assert len(re.findall(r"^ +\d+  ", output, re.MULTILINE)) == int(rows)
    training = load(Experiment, str(ROOT / "configs/debug/demo.yaml"), []).training
    command, output = (block.text for block in blocks(DOCS / "ledger.md"))
    assert "ledger verify demo/run" in command
    examples = training.steps * training.global_batch_size
    assert f"verified: {training.steps:,} steps consumed {examples:,} examples" in output


# Settings of an experiment that a part of one does not show.
NOT_SHOWN = r"my_package|a task's head|path is .* sources|vocab_size is required|init_from"


def test_parts_of_experiments_have_settings_that_exist(tmp_path: Path):
    sections = {field.name for field in dataclasses.fields(Experiment)}
    file = tmp_path / "experiment.yaml"
    whole, faults = 0, []
    for page in PAGES:
        for text in (block.text for block in blocks(page) if block.label == "yaml"):
            if not yaml.safe_load(text).keys() <= sections:
                continue  # a dataset, task, study or cluster
            file.write_text(f"base: {ROOT}/configs/debug/bert_mini.yaml\n{text}", encoding="utf-8")
            try:
                load(Experiment, str(file), [])
                whole += 1
            except ConfigError as error:
                faults.append(f"{page.name}: {error}")
    assert [each for each in faults if not re.search(NOT_SHOWN, each)] == []
    assert whole > 10
