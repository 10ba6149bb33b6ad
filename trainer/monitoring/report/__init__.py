"""`samestep report` and `samestep watch`: one self-contained HTML page about one or several runs.

This package reads run folders and downsamples their metrics; page.js plots them. Data of a run is
in the page as JSON only, which the script inserts as text, so no name can be interpreted as HTML.
The page of `samestep watch` is the same one: its script fetches the data again every two seconds.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import itertools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from samestep.config import Kinds, Tree
from samestep.config.changes import changed
from samestep.errors import ConfigError, DataError, SamestepError
from samestep.storage import shown, write_text
from samestep.stored_json import finite
from samestep.tasks import TASKS
from samestep.untrusted import read_regular
from trainer.monitoring.report.run import RunFolder
from trainer.monitoring.report.study import MOST_PAGE_BYTES, StudiesFolder
from trainer.monitoring.report.suite import PLAN, SuiteFolder

MOST_RUNS = 10  # colors that one can tell apart
LINKS = "study"
"""What the address of a page of a study begins with, see `Report.linked`."""
_OBJECTIVES = Kinds("trainer.objectives.kinds")


class Report:
    """The page's data; each `data` reads only what the runs have written since the last call.

    Args:
        folders: at most 10 runs, suites of `samestep finetune-suite`, or folders of `samestep
            study`. They need not exist yet.
        schema: of a run's settings; with it, settings that differ from the defaults come first.

    Raises:
        ConfigError: there are too many, one is named twice, or one is a file.
    """

    def __init__(self, folders: Sequence[str], schema: type[object] | None = None) -> None:
        self._schema = schema
        # A page that is watched asks every two seconds.
        self._set_by_users = functools.lru_cache(maxsize=2 * MOST_RUNS)(self._changed)
        if len(folders) > MOST_RUNS:
            raise ConfigError(
                f"a report shows at most {MOST_RUNS} runs, not {len(folders)}; leave some out"
            )
        paths = [Path(folder) for folder in folders]
        for i, path in enumerate(paths):
            if path.resolve() in [other.resolve() for other in paths[:i]]:
                raise ConfigError(f"{path} is named twice. Leave one out.")
            if path.exists() and not path.is_dir():
                raise ConfigError(f"{path} is a file. Name the output folder of a run.")
        self.names = _names(paths)
        self.folders = [RunFolder(path) for path in paths]
        self._suites = [SuiteFolder(path) for path in paths]
        self._studies = [StudiesFolder(path) for path in paths]

    def data(self, live: bool = False) -> Tree:
        """The data of the page, now.

        Args:
            live: the page shall fetch this again and again.
        """
        runs, suites, studies, configs, tasks = [], [], [], [], []
        folders = zip(self.names, self.folders, self._suites, self._studies, strict=True)
        for number, (name, run, suite, of_folder) in enumerate(folders):
            # A folder becomes one of the three when its process starts.
            if of_folder.studies:
                studies += of_folder.describe(f"{LINKS}/{number}" if live else None)
                continue
            if (run.folder / PLAN).is_file():
                suites.append(suite.describe(name))
                continue
            run.read()
            runs.append(run.describe(name))
            configs.append(run.config)
            tasks.append(_task(run.folder, run.config))
        now = time.time()
        return {
            "runs": runs,
            "suites": suites,
            "studies": studies,
            "settings": _settings(configs, map(self._set_by_users, map(json.dumps, configs))),
            # Curves of several tasks in one chart have no name in common.
            "task": tasks[0] if len(set(tasks)) == 1 else None,
            "of_task": all(tasks),
            "masked": all(_is_masked(_objective(config)) for config in configs),
            "live": live,
            "now": now,
        }

    def _changed(self, config: str) -> set[str]:
        return set() if self._schema is None else set(changed(self._schema, json.loads(config)))

    def linked(self, link: str) -> tuple[str, bool] | None:
        """The page behind a link in the data: of a study, or of a run of a study.

        Args:
            link: as study/0/masking_rate, or study/0/masking_rate/train-1f2e3d4c5b.

        Returns:
            The page, and whether it was made here. A study's own page may be a stranger's, who may
            have put a script in it. None if the data have no such link.
        """
        kind, _, rest = link.partition("/")
        number, _, address = rest.partition("/")
        if kind != LINKS or number not in map(str, range(len(self._studies))):
            return None
        found = self._studies[int(number)].target(address)
        if found is None:
            return None
        path, run = found
        if run is None:
            return read_regular(path, MOST_PAGE_BYTES).decode(errors="replace"), False
        report = Report([str(path)], self._schema)
        report.names = [run]
        return page(report.names, report.data()), True


def _is_known(folder: RunFolder) -> bool:
    has_file = any((folder.folder / name).is_file() for name in ("config.yaml", PLAN))
    return has_file or bool(StudiesFolder(folder.folder).studies)


def write_report(
    runs: Sequence[str],
    output: Path,
    planned_memory: Callable[[Path], float | None] = lambda run: None,
    schema: type[object] | None = None,
) -> None:
    """Writes the page. A run may still be running.

    Args:
        runs: at most 10 run folders.
        output: the HTML file.
        planned_memory: returns the peak that `samestep plan` predicts for a run, in GiB of a
            device; None if unknown.
        schema: see `Report`.

    Raises:
        ConfigError: there are too many runs, or a folder is not a run.
        DataError: no run has metrics.
        StorageError: the file cannot be written.
    """
    report = Report(runs, schema)
    for run in report.folders:
        if not _is_known(run):
            raise ConfigError(
                f"{run.folder} is not a run (it has no config.yaml). Name the output folder of "
                "a run"
            )
    data = report.data()
    if not has_metrics(data):
        raise DataError(
            f"{', '.join(runs)} has no metrics yet; train for at least training.log_every steps"
        )
    for run in report.folders:
        run.planned_memory = planned_memory(run.folder)
    write_text(output, page(report.names, report.data()))


def has_metrics(data: Tree) -> bool:
    """Whether there is anything to show."""
    return bool(data["suites"] or data["studies"]) or any(run["series"] for run in data["runs"])


def page(names: Sequence[str], data: Tree) -> str:
    """Returns the page, with its data inside.

    Args:
        names: of the runs.
        data: of `Report.data`.
    """
    parts = {
        "POLICY": policy(),
        "TITLE": html.escape(" · ".join(names)),
        "STYLE": _resource("page.css"),
        "SCRIPT": _resource("page.js"),
        # Inside <script>, "<" is the only character that could end the script.
        "DATA": as_json(data).replace("<", "\\u003c"),
    }
    # All in one pass: a name may contain "__DATA__", which must stay as it is.
    pattern = f"__({'|'.join(parts)})__"
    return re.sub(pattern, lambda found: parts[found[1]], _resource("page.html"))


def policy() -> str:
    """The page's Content-Security-Policy: its own script runs, and asks its own server only."""
    script = f"\n{_resource('page.js')}\n"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'"
    )


def as_json(data: Tree) -> str:
    """Returns data as the page reads it: numbers that are not finite, which JSON lacks, as null."""
    try:
        return _dumps(data)
    except ValueError:  # such a number, from a stranger's row or a sum of huge ones
        return _dumps(finite(data))


def _dumps(data: Tree) -> str:
    return json.dumps(data, separators=(",", ":"), allow_nan=False)


def _resource(name: str) -> str:
    return files(__name__).joinpath(name).read_text(encoding="utf-8")


def _suite_run(folder: Path) -> tuple[str, str] | None:
    """The task and the settings of a run of `samestep finetune-suite`, by its place."""
    # Example: suite/runs/rte/lr-2e-05-seed-0-1f2e3d4c gives "rte" and "lr 2e-05, seed 0".
    place = folder.resolve()
    found = re.fullmatch(r"(.+)-[0-9a-f]{8}", place.name)
    in_suite = place.parent.parent.name == "runs" and (place / "experiment.yaml").exists()
    if found is None or not in_suite:
        return None
    settings = re.findall(r"([a-z_]*[a-z])-(\d[\d.]*(?:e[-+]?\d+)?)", found[1])
    words = [f"{name.rpartition('_')[2]} {value}" for name, value in settings]
    words = ["random weights"] * ("scratch-seed" in found[1]) + [
        word.replace("scratch-", "") for word in words
    ]
    return place.parent.name, ", ".join(words)


def _objective(config: Tree) -> str:
    """The kind of the objective that makes the batches, inside of those that wrap it."""
    objective = config.get("objective") or {}
    while isinstance(objective, dict) and isinstance(objective.get("of"), dict | str):
        objective = objective["of"]
    return str(objective.get("kind", "")) if isinstance(objective, dict) else str(objective)


def _is_masked(kind: str) -> bool:
    """Whether the accuracy of an objective is of masked positions."""
    if not kind:  # not started yet
        return False
    try:
        return bool(getattr(_OBJECTIVES.schema(kind, "objective"), "masked", False))
    except SamestepError:  # a module of the user that this machine lacks
        return False


def _task(folder: Path, config: Tree) -> str | None:
    """What the run's curves are named by: the task of its suite, or the kind of the task."""
    if (found := _suite_run(folder)) is not None:
        return found[0]
    kind = _objective(config)
    return kind.replace("_", " ") if kind in TASKS else None


def _names(folders: Sequence[Path]) -> list[str]:
    """Names of runs: of a suite, the task and the settings; else the last part of their paths.

    Where these are equal, as many parts of the paths as make them differ.
    """
    if all(found := [_suite_run(folder) for folder in folders]):
        of_suite = [", ".join(each) for each in found if each is not None]
        if len(set(of_suite)) == len(folders):
            return of_suite
    # Example: a/run and b/run have the same last part, so their names have two parts.
    paths = [folder.resolve().parts for folder in folders]
    for parts in range(1, max(map(len, paths)) + 1):
        names = ["/".join(path[-parts:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def _settings(configs: Sequence[Tree], changes: Iterable[set[str]] = ()) -> list[Tree]:
    """All settings: dotted key, value in each run, and whether the values differ.

    Those that differ from the defaults in a run are marked, and come first.
    """
    set_by_users = set[str]().union(*changes)
    # Runs of different kinds have different settings; a missing one is an empty text.
    flat = [dict(_leaves(config)) for config in configs]
    table = []
    for key in dict.fromkeys(itertools.chain(*flat)):
        values = [settings.get(key, "") for settings in flat]
        # The output folder always differs and is not marked.
        differs = key != "output" and len(set(values)) > 1
        is_set = key in set_by_users
        table.append({"key": key, "values": values, "differs": differs, "changed": is_set})
    return sorted(table, key=lambda setting: not setting["changed"])


def _leaves(
    tree: Tree,
    path: str = "",
) -> Iterator[tuple[str, str]]:
    """The settings of a tree by dotted key; an empty section is a setting, too."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{path}{key}.")
        else:
            text = value if isinstance(value, str) else json.dumps(value)
            yield f"{path}{key}", shown(text)  # old runs may hold passwords


def default_output(runs: Sequence[str]) -> Path:
    """The default file: in the run folder, or for several runs in the working folder."""
    folder = runs[0] if len(runs) == 1 else "."
    return Path(folder, "report.html")
