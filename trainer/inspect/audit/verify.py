"""`samestep ledger verify`: whether a run was fed what its data order says, each example once.

Four things are shown, each from what the one before has shown: the rows of the ledger are those
that were written (the chain, and its head in the newest checkpoint); they cover the steps and the
examples of each data order without a hole or an overlap; the sums in them are those of the rows
that the dataset gives for these examples; and by their names in the dataset, these are all examples
of each finished pass, once.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from data_pipeline.order.exclusions import Exclusions
from data_pipeline.reading.length_groups import GROUPS
from trainer.checkpoint import integrity
from trainer.errors import CheckpointError
from trainer.inspect.audit.batches import Columns, Run, columns
from trainer.inspect.audit.tally import Int64, Tally
from trainer.training.ledger import Row
from trainer.training.run import checkpoint_folder

logger = logging.getLogger(__name__)

_MOST_PROBLEMS = 20  # that are printed


@dataclass
class Verdict:
    """What the ledger of a run has to say.

    Attributes:
        steps: that the run has taken.
        elsewhere: how many of these another program took, of which the ledger says nothing.
        tallies: by the number of the data order and the name of the source.
        exclusions: the rows about examples that the run passed over.
        problems: what is wrong, a sentence each; none is a proof.
    """

    steps: int = 0
    elsewhere: int = 0
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)
    exclusions: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


@dataclass
class Stretch:
    """Rows of the ledger that count examples of the same data order.

    Those after a row of kind `order`.
    """

    order: Row
    fed: list[Row] = field(default_factory=list)

    @property
    def first(self) -> int:
        return min(int(first) for row in self.fed for first, _ in row["examples"])

    @property
    def end(self) -> int:
        return max(int(end) for row in self.fed for _, end in row["examples"])


def verify(run: Run) -> Verdict:
    """Proves what a run was fed, or finds out why that cannot be proven.

    Raises:
        DataError: the dataset is missing, damaged or another one.
        ConfigError: the run's configuration no longer has the phases that the ledger is about.
    """
    verdict = Verdict(
        exclusions=[row for row in run.rows if row["kind"] in ("excluded", "corrupt")]
    )
    verdict.problems += [*_broken_chain(run), *_forgotten_head(run), *_uncovered(run, verdict)]
    for stretch in _stretches(run.rows):
        verdict.problems += _remake(run, stretch, verdict)
    for (order, source), tally in verdict.tallies.items():
        for number, each in sorted(tally.passes.items()):
            name = f"pass {number + 1} over {source} in data order {order}"
            if each.repeated:
                verdict.problems.append(f"{name}: {each.repeated} examples were consumed again")
            if tally.is_over(number) and each.missing:
                verdict.problems.append(f"{name}: {each.missing} examples were never consumed")
    return verdict


def _broken_chain(run: Run) -> Iterator[str]:
    if len(run.rows) < run.lines:
        yield (
            f"line {len(run.rows) + 1} of {run.lines} of ledger.jsonl does not follow from those "
            "before it: it has "
            "been changed, or one before it removed; it and the lines after it are not looked at"
        )
    for row in run.rows:
        if row["kind"] == "lost":
            yield f"the rows up to step {row['step']} were missing or damaged when the run was continued there"


def _forgotten_head(run: Run) -> Iterator[str]:
    """Compares with the newest checkpoint that can be read.

    What comes after it nobody else has written down.
    """
    root = checkpoint_folder(run.experiment)
    for step in reversed(integrity.committed_steps(root)):
        try:
            head = (
                integrity.read_meta(integrity.step_folder(root, step))
                .get("ledger", {})
                .get("head", "")
            )
        except CheckpointError as error:
            logger.warning("passing over the checkpoint of step %d: %s", step, error)
            continue
        if not any(head in (row["head"], row.get("before")) for row in run.rows):
            yield (
                f"ledger.jsonl does not lead to the checkpoint of step {step}, whose head is "
                f"{head[:12]}...: rows up "
                "to that step have been changed or removed"
            )
        return


def _stretches(rows: Sequence[Row]) -> list[Stretch]:
    found: list[Stretch] = []
    for row in rows:
        if row["kind"] == "order":
            found.append(Stretch(row))
        elif row["kind"] == "fed" and found:
            found[-1].fed.append(row)
    return [stretch for stretch in found if stretch.fed]


def _excluded(rows: Sequence[Row], order: int) -> Exclusions:
    return Exclusions(
        part
        for row in rows
        if (row["kind"], row.get("order")) == ("excluded", order)
        for part in row["examples"]
    )


def _uncovered(run: Run, verdict: Verdict) -> Iterator[str]:
    """Follows steps and examples from row to row."""
    following: dict[int, int] = {}
    if run.rows and run.rows[0]["kind"] == "taken":
        verdict.steps = verdict.elsewhere = run.rows[0]["step"]
    fed = [row for row in run.rows if row["kind"] == "fed"]
    exclusions = {order: _excluded(run.rows, order) for order in {row["order"] for row in fed}}
    for row in fed:
        if row["first_step"] != verdict.steps + 1:
            yield f"the row of step {row['step']} begins with step {row['first_step']}, not {verdict.steps + 1}"
        verdict.steps = row["step"]
        excluded = exclusions[row["order"]]
        for first, end in row["examples"]:
            expected = following.get(row["order"], 0)
            steps = f"of data order {row['order']}, by the row of steps {row['first_step']} to {row['step']}"
            if first < expected:
                yield f"examples {first} to {min(end, expected) - 1} {steps}, were consumed again"
            if lost := excluded.kept(expected, first) if first > expected else []:
                yield f"examples {', '.join(f'{a} to {b - 1}' for a, b in lost)} {steps}, were never consumed"
            if excluded.kept(first, end) != [[first, end]]:
                yield f"examples between {first} and {end} {steps}, were consumed and are excluded"
            following[row["order"]] = max(expected, end)


def _remake(run: Run, stretch: Stretch, verdict: Verdict) -> Iterator[str]:
    """Makes the batches of a stretch again, counts their examples, and compares the sums of their
    hashes.
    """
    order = stretch.order["order"]
    excluded = _excluded(run.rows, order)
    segments = [(*part, index) for index, row in enumerate(stretch.fed) for part in row["examples"]]
    first, end, row = np.array(sorted(segments), dtype=np.int64).T
    reach = np.maximum.accumulate(end)
    sums = np.zeros(len(stretch.fed), dtype=np.uint64)
    with (
        run.loader(stretch.order, stretch.first, stretch.end) as loader,
        _progress(order) as progress,
    ):
        task = progress.add_task("", total=stretch.end - stretch.first)
        lanes, group = stretch.order["data"]["lanes"], stretch.order["data"].get("group_by_length")
        tallies = [
            verdict.tallies.setdefault((order, name), Tally(size, lanes, group and GROUPS * group))
            for name, size in loader.sources
        ]
        for part in columns(
            loader, ("digest", "source", "epoch", "example", "filled"), stretch.end
        ):
            start, size = int(part["number"][0]), len(part["number"])
            near = slice(
                np.searchsorted(reach, start, "right"), np.searchsorted(first, start + size)
            )
            begin, stop = (np.clip(bound[near] - start, 0, size) for bound in (first, end))
            prefix = np.concatenate(([0], np.cumsum(part["digest"]))).view(
                np.uint64
            )  # modulo 2**64
            np.add.at(sums, row[near], prefix[stop] - prefix[begin])
            times = np.zeros(size + 1, dtype=np.int64)
            np.add.at(times, begin, 1)
            np.subtract.at(times, stop, 1)
            _count(part, np.cumsum(times)[:-1], excluded, tallies)
            progress.advance(task, size)
    for fed, digest in zip(stretch.fed, sums.tolist(), strict=True):
        if fed["digest"] != f"{digest:016x}":
            yield (
                f"steps {fed['first_step']} to {fed['step']} were fed other rows than those that "
                f"{run.dataset.name} "
                f"gives for the examples that they took: their sum is {fed['digest']}, not "
                f"{digest:016x}"
            )


def _count(part: Columns, times: Int64, excluded: Exclusions, tallies: Sequence[Tally]) -> None:
    """Adds consecutive examples, which were fed so many times each, to the tallies of their
    sources.
    """
    passed_over = np.zeros(len(times), dtype=np.bool_)
    start = int(part["number"][0])
    for first, end in excluded.ranges:
        passed_over[max(0, first - start) : max(0, end - start)] = True
    of_corrupt = part["filled"] == 0  # shards that are passed over
    passed_over |= of_corrupt
    times = np.where(of_corrupt, 0, times)
    for source in np.unique(part["source"]).tolist():
        rows = part["source"] == source
        tallies[source].add(
            {name: column[rows] for name, column in part.items()}, times[rows], passed_over[rows]
        )


def _progress(order: int) -> Progress:
    console = Console(stderr=True)
    return Progress(
        TextColumn(f"data order {order}"),
        BarColumn(),
        TextColumn("{task.completed:,.0f} of {task.total:,.0f} examples"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )


def report(verdict: Verdict, console: Console) -> None:
    """Prints a table of the passes, what was excluded, what is wrong, and the verdict in one line."""
    several = len({source for _, source in verdict.tallies}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("passes", "examples", "consumed", "excluded", "lost", "repeated")
    for name in ("order", *(["source"] if several else []), *names):
        table.add_column(name, justify="right")
    for (order, source), tally in verdict.tallies.items():
        for cells, alike in itertools.groupby(sorted(tally.passes), partial(_cells, tally)):
            first, *_, last = 2 * list(alike)
            passes = f"{first + 1}" if first == last else f"{first + 1} to {last + 1}"
            passes += "" if tally.is_over(last) else ", under way"
            table.add_row(str(order), *([source] if several else []), passes, *cells)
    console.print(table)
    for row in verdict.exclusions:
        if row["kind"] == "corrupt":
            examples = f"{row['first']} and later that are in {row['shard']}"
            reason = (
                f"its bytes have changed; it is of the dataset of digest {row['dataset'][:12]}..."
            )
        else:
            examples = ", ".join(f"{first} to {end - 1}" for first, end in row["examples"])
            reason = row["reason"]
        console.print(
            f"excluded from step {row['step']} on: examples {examples} of data order "
            f"{row['order']} ({reason})",
            markup=False,
        )
    for problem in verdict.problems[:_MOST_PROBLEMS]:
        console.print(problem, markup=False, style="red")
    if more := verdict.problems[_MOST_PROBLEMS:]:
        console.print(f"and {len(more)} more such findings", style="red")
    consumed = sum(
        each.consumed for tally in verdict.tallies.values() for each in tally.passes.values()
    )
    said = f"{verdict.steps - verdict.elsewhere:,} steps consumed {consumed:,} examples"
    if verdict.elsewhere:
        said = f"after {verdict.elsewhere:,} steps of another program, of which the ledger says nothing, {said}"
    if verdict.problems:
        console.print(f"NOT VERIFIED, for the reasons above; by what is left of the ledger, {said}")
    else:
        console.print(
            f"verified: {said}, each of a finished pass exactly once and of the last at most once"
        )


def _cells(tally: Tally, number: int) -> tuple[str, ...]:
    """What the table says of a pass.

    Its examples, and how many were consumed, excluded, lost and repeated.
    """
    each = tally.passes[number]
    lost = each.missing if tally.is_over(number) else 0
    return tuple(
        f"{cell:,}" for cell in (tally.size, each.consumed, each.excluded, lost, each.repeated)
    )
