"""Names and files from outside go through samestep.untrusted: a new join or read says why not.

Both searches read code, so they see neither types nor values: a join counts if the name on its
right looks like one of a file, and a read if it is one of the usual calls.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = ("trainer", "data_pipeline", "launch", "samestep")
_COMPUTE = (
    *("trainer/accelerators/", "trainer/generation/", "trainer/metrics/", "trainer/models/"),
    *("trainer/objectives/", "trainer/optim/", "trainer/vectors/w", "data_pipeline/order/"),
    "trainer/studies/finetune/runs.py",
)
"""Where `/` divides, and no file of others is read."""
_NAME = re.compile(r"(^|[._])(name|names|shard|file|member|entry|pointer|folder|key|path)$|\[")

JOINS: dict[str, tuple[str, ...]] = {
    # The name was checked when its list was read.
    "trainer/checkpoint/huggingface.py": (
        *("folder / shard", "folder / shards[absent[0]]", "folder / name", "source / name"),
        *("target / name", "temporary / config_name", "temporary / name"),
    ),
    "trainer/checkpoint/integrity.py": (
        *("folder / item[0]", "folder / name", "root / folder.name", "root / name"),
    ),
    "data_pipeline/building/push.py": ("folder / name",),
    "data_pipeline/building/verify.py": ("folder / name",),
    "data_pipeline/format/manifest.py": ("folder / name",),
    "data_pipeline/reading/dataset.py": (
        *("folder / shard.name", "self.path / info.name", "self.path / name"),
    ),
    "data_pipeline/reading/packed_split.py": ("self._dataset.path / name",),
    "samestep/untrusted.py": ("folder / name",),
    # A name that a folder's own listing has, to read or remove it there.
    "trainer/checkpoint/collective.py": (
        *("folder / gather(f'{_TOKEN}{uuid.uuid4().hex}', world_size)[0]", "folder / name"),
    ),
    "trainer/checkpoint/holding.py": ("self._root / name",),
    "trainer/checkpoint/files.py": (
        *("folder / name", "source / name", "target / name", "temporary / name"),
    ),
    "trainer/checkpoint/lease.py": ("self.root / name",),
    "trainer/checkpoint/manager.py": (
        *("self.folder / gather(folder.name, self._world_size)[0]", "self.folder / names[step]"),
    ),
    "trainer/elastic/host.py": ("self._folder / name",),
    "trainer/inspect/housekeeping.py": ("folder / name",),
    "launch/submission/snapshot.py": ("directory / name", "directory / path", "target / path"),
    # Where the name leads is checked, links included.
    "trainer/monitoring/report/study.py": ("folder / job.folder", "folder / each.folder"),
    "trainer/monitoring/report/suite.py": ("self._folder / run.folder",),
    # A name that samestep has made, or that the user has chosen.
    "trainer/checkpoint/deepspeed.py": (
        *("folder / name", "path / pointer", "folder / _UNIVERSAL / name"),
    ),
    "trainer/checkpoint/history.py": ("root / name",),
    "samestep/config/recipes.py": ("(folder or Path.cwd()) / name",),
    "samestep/config/tree.py": ("(folder or Path.cwd()) / name",),
    "trainer/inspect/fetch.py": ("folder / path",),
    "trainer/inspect/recipes.py": ("folder / source.name",),
    "trainer/monitoring/report/__init__.py": (
        *("files(__name__).joinpath(name)", "folder.folder / name"),
    ),
    "trainer/monitoring/report/run.py": ("folder / name",),
    "trainer/publish/model_card.py": ("run / name",),
    "samestep/storage/hub.py": ("folder / name",),
    "trainer/studies/cli.py": ("args.output / study.name",),
    "trainer/studies/finetune/page.py": ("folder / file", "run.folder / name"),
    "trainer/studies/finetune/task.py": ("folder / name",),
    "trainer/studies/inputs.py": ("default_folder() / 'digests' / key",),
    "trainer/studies/template.py": ("folder.joinpath(file)",),
    "trainer/training/shared_facts.py": ("folder / name",),
    "data_pipeline/building/build.py": ("self.folder / shard.name",),
    "data_pipeline/building/slices.py": ("self._locks / name",),
    "data_pipeline/building/units.py": ("self._folder / name",),
    "data_pipeline/building/passages.py": ("folder / '.build' / name", "self._folder / name"),
    "data_pipeline/reading/remote.py": (
        *("download / 'tokenizer' / name", "folder / 'tokenizer' / name", "folder / name"),
    ),
    "data_pipeline/sources/kinds/python_docs.py": ("library() / name",),
    "data_pipeline/tokenizers/tokenizer.py": ("folder / name",),
    "launch/cli.py": ("launch.job.folder / name",),
    "launch/scripts/__main__.py": ("FOLDER / name",),
    "launch/submission/submit.py": (
        *("folder / name", "records.state_folder() / 'launches' / name"),
    ),
}  # fmt: skip
"""Joins of variable names by file."""

READS = {
    # After a check that it is a regular file.
    *("trainer/checkpoint/deepspeed.py", "trainer/checkpoint/elmo.py"),
    *("trainer/checkpoint/files.py", "trainer/inspect/audit/batches.py"),
    *("trainer/training/shared_facts.py", "samestep/untrusted.py"),
    *("data_pipeline/format/shards.py", "samestep/storage/objects.py"),
    *("data_pipeline/tokenizers/huggingface.py", "data_pipeline/tokenizers/settings.py"),
    "data_pipeline/tokenizers/huggingface_models.py",
    "trainer/monitoring/report/study.py",
    # Of the system, or of samestep itself.
    *("samestep/environment.py", "trainer/monitoring/costs.py", "launch/kinds/local.py"),
    *("trainer/checkpoint/lock.py", "trainer/training/compute/arithmetic.py"),
    *("trainer/inspect/cli.py", "trainer/inspect/recipes.py", "trainer/studies/template.py"),
    *("trainer/monitoring/report/__init__.py", "data_pipeline/sources/kinds/python_docs.py"),
    "launch/scripts/__init__.py",
    # Named by the user for this command; may be a pipe.
    *("samestep/config/tree.py", "trainer/elastic/secret.py", "trainer/inference/candidates.py"),
    *("trainer/inspect/certify/layouts.py", "trainer/inspect/certify/run.py"),
    *("trainer/strategies/deepspeed/settings.py", "trainer/studies/inputs.py"),
    "data_pipeline/building/tokenizer_extension.py",
    # Work that this command, or an earlier one of the same user, has left in its own output.
    *("trainer/inference/resumable.py", "trainer/inference/features.py", "trainer/vectors/work.py"),
    *("trainer/monitoring/report/suite.py", "trainer/publish/fast_tokenizer.py"),
    *("trainer/publish/hub.py", "trainer/publish/tokenizer.py", "samestep/storage/local.py"),
    "samestep/storage/new_folder.py",
    *(
        "trainer/training/observers/profiler.py",
        "trainer/studies/execution.py",
        "trainer/studies/finetune/suite.py",
    ),
    *("trainer/studies/jobs.py", "trainer/studies/page.py", "trainer/studies/row_scores.py"),
    *("trainer/studies/stages/__init__.py", "trainer/training/compute/micro_batch.py"),
    *("trainer/vectors/cooccurrence.py", "trainer/vectors/corpus.py", "trainer/vectors/glove.py"),
    "trainer/vectors/train.py",
    *("data_pipeline/building/build.py", "data_pipeline/building/duplicates.py"),
    *("data_pipeline/building/passages.py", "data_pipeline/building/units.py"),
    *("data_pipeline/reading/cache.py",),
    *("launch/logs.py", "launch/records.py", "launch/kinds/slurm.py"),
    *("launch/tpu/slice.py", "launch/tpu/supervisor.py", "launch/tpu/machine.py"),
}
"""Files with reads that may block, or may read for ever, if somebody else made the folder."""
_LIBRARIES = {
    *("load_file", "safe_open", "np.load", "np.memmap", "torch.load", "torch.from_file"),
    *("zipfile.ZipFile", "tokenizers.Tokenizer.from_file", "models.BPE.from_file"),
}


_CALLS = {"open", "read_text", "read_bytes", *(each.rpartition(".")[2] for each in _LIBRARIES)}


def joins(code: str) -> Iterator[str]:
    """Joins of a path and a variable name."""
    for node in _calls_and_divisions(code):
        names: list[ast.expr] = []
        match node:
            case ast.BinOp(right=right):
                names = [right]
            case ast.Call(func=ast.Attribute(attr="joinpath"), args=arguments):
                names = arguments
            case ast.Call(func=ast.Attribute(value=ast.Attribute(attr="path"), attr="join")):
                names = node.args
        for name in names:
            if isinstance(name, ast.Name | ast.Attribute | ast.Subscript):
                text = ast.unparse(name)
                if _NAME.search(text) and not text.rpartition(".")[2].isupper():
                    yield ast.unparse(node)


def reads(code: str) -> Iterator[str]:
    """Calls that open a file by its path for reading."""
    for node in _calls_and_divisions(code):
        match node:
            case ast.Call(func=ast.Attribute(attr=name)) | ast.Call(func=ast.Name(id=name)):
                pass
            case _:
                continue
        if name not in _CALLS:
            continue
        function, call = ast.unparse(node.func), ast.unparse(node)
        modes = [each.value for each in node.args if isinstance(each, ast.Constant)]
        has_mode = any(isinstance(mode, str) and {*mode} <= {*"rbt"} for mode in modes)
        writes = any(isinstance(mode, str) and {*mode} & {*"wax"} for mode in modes)
        if (
            name in ("read_text", "read_bytes")
            or (name == "open" and (has_mode or (function == "open" and not writes)))
            or (function in _LIBRARIES and "regular(" not in call)
        ) and "fileobj" not in call:
            yield call


@cache
def _calls_and_divisions(code: str) -> list[ast.Call | ast.BinOp]:
    return [
        node
        for node in ast.walk(ast.parse(code))
        if isinstance(node, ast.Call)
        or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div))
    ]


def _found(search: Callable[[str], Iterator[str]]) -> Iterator[tuple[str, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith(_COMPUTE):
                yield from ((name, text) for text in search(path.read_text(encoding="utf-8")))


def test_a_name_from_outside_is_joined_by_inside() -> None:
    unknown = [(path, text) for path, text in _found(joins) if text not in JOINS.get(path, ())]
    # Use samestep.untrusted.inside; or add the join, where the name cannot be a stranger's.
    assert unknown == []


def test_a_file_of_a_folder_from_outside_is_opened_by_open_regular() -> None:
    unknown = [(path, text) for path, text in _found(reads) if path not in READS]
    # Use open_regular, read_regular or regular; or add the file, with the reason that it has.
    assert unknown == []


@pytest.mark.parametrize(
    ("search", "code"),
    [
        *((joins, code) for code in ("folder / name", "a / shard.name", "a / map[key]")),
        *((joins, code) for code in ("a.joinpath(name)", "os.path.join(a, name)")),
        *((reads, code) for code in ("path.read_text()", "open(path)", 'path.open("rb")')),
        *((reads, code) for code in ("load_file(path)", "np.load(path)")),
    ],
)
def test_the_searches_find(search: Callable[[str], Iterator[str]], code: str) -> None:
    assert [*search(code)] == [code.replace('"', "'")]
