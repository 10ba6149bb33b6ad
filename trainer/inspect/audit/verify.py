"""`samestep ledger verify`: proves that a run consumed each example of its data order once.

Four things are shown, each relying on the one before:

1. The ledger's rows are those that were written: their hash chain holds, and the newest checkpoint
   has its head.
2. The rows cover the steps and the examples of each data order without a gap or an overlap.
3. The run consumed these examples: the hash sums in the rows match the recomputed batches.
4. Counted by their numbers in the dataset, these are all examples of each finished pass, once each.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from rich import box
from rich.table import Table

from data_pipeline.order.exclusions import Exclusions
from data_pipeline.reading.length_groups import GROUPS
from samestep.progress import Progress
from samestep.terminal import Console
from trainer.checkpoint.meta import newest_meta
from trainer.inspect.audit.batches import Columns, Run, columns
from trainer.inspect.audit.tally import Int64, Tally
from trainer.training.compose import checkpoint_folder
from trainer.training.ledger import Row

_SLACK = 10
_PROBLEMS_SHOWN = 20


@dataclass
class Verdict:
    """The result of verifying a ledger.

    Attributes:
        steps: taken by the run.
        elsewhere: number of these that another program took, about which the ledger says nothing.
        tallies: by the number of the data order and the name of the source.
        exclusions: the rows about examples that the run skipped.
        problems: a sentence each; without any, the run is proven.
    """

    steps: int = 0
    elsewhere: int = 0
    tallies: dict[tuple[int, str], Tally] = field(default_factory=dict)
    exclusions: list[Row] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify(run: Run) -> Verdict:
    """Proves that a run has consumed its examples, or collects the reasons why it cannot.

    Raises:
        DataError: the dataset is missing, damaged, or not the run's.
        ConfigError: the run's configuration no longer has the ledger's phases.
    """
    rows = [row for row in run.rows if row["kind"] in ("excluded", "corrupt")]
    verdict = Verdict(exclusions=rows)
    verdict.problems += [*_broken_chain(run), *_forgotten_head(run), *_uncovered(run, verdict)]
    # Only now read the data: the checks above take seconds, this takes as long as loading it.
    ends: dict[int, int] = {}
    for order, recorded in _by_order(run.rows):
        consumed, beyond = _possible(run, order["order"], recorded)
        verdict.problems += beyond
        if not any(row["examples"] for row in consumed):
            continue
        # Between rows of one order, or before its first, there may be excluded examples.
        begin = ends.get(order["order"], 0)
        verdict.problems += _recompute(run, order, consumed, begin, verdict)
        ends[order["order"]] = max(end for row in consumed for _, end in row["examples"])
    for (order_number, source), tally in verdict.tallies.items():
        for number, each in sorted(tally.passes.items()):
            name = f"pass {number + 1} over {source} in data order {order_number}"
            if each.repeated:
                verdict.problems.append(f"{name}: {each.repeated} examples were consumed again")
            # An epoch that is still being read may miss examples.
            if tally.is_over(number) and each.missing:
                verdict.problems.append(f"{name}: {each.missing} examples were never consumed")
    return verdict


def _broken_chain(run: Run) -> Iterator[str]:
    if len(run.rows) < run.lines:
        yield (
            f"line {len(run.rows) + 1} of {run.lines} of ledger.jsonl does not follow from those "
            "before it: it was changed, or one before it was removed; it and the lines after it "
            "are ignored"
        )
    for row in run.rows:
        if row["kind"] == "lost":
            step = row["step"]
            yield f"the rows up to step {step} were missing or damaged when the run was resumed"


def _forgotten_head(run: Run) -> Iterator[str]:
    """Compares with the newest readable checkpoint; of later rows there is no other record."""
    meta = newest_meta(checkpoint_folder(run.experiment))
    head = meta.get("ledger", {}).get("head", "")
    # A row of kind `lost` has the head that it replaced under `before`.
    if meta and not any(head in (row["head"], row.get("before")) for row in run.rows):
        yield (
            f"ledger.jsonl does not lead to the checkpoint of step {meta['step']}, whose head is "
            f"{head[:12]}...: rows up to that step were changed or removed"
        )


def _by_order(rows: Sequence[Row]) -> list[tuple[Row, list[Row]]]:
    """Groups the rows of kind `fed` under the row of kind `order` before them."""
    found: list[tuple[Row, list[Row]]] = []
    for row in rows:
        if row["kind"] == "order":
            found.append((row, []))
        elif row["kind"] == "fed" and found:
            found[-1][1].append(row)
    return [(order, consumed) for order, consumed in found if consumed]


def _possible(run: Run, order: int, rows: Sequence[Row]) -> tuple[list[Row], list[str]]:
    """Splits off rows with examples that no run of these settings reaches, as sentences.

    Recomputing a forged row of 10^15 examples would not end.
    """
    phases = [phase for phase in run.experiment.resolved_phases() if phase.order == order]
    # An earlier start of the run may have had more steps or a larger batch.
    most = _SLACK * max((phase.end * phase.global_batch_size for phase in phases), default=0)
    most += max((end for _, end in run.experiment.data.exclude), default=0)
    possible, beyond = [], []
    for row in rows:
        if phases and max((end for _, end in row["examples"]), default=0) > most:
            beyond.append(
                f"steps {row['first_step']} to {row['step']} of data order {order} have examples "
                f"beyond {most}, which the run's settings do not reach; they are not recomputed"
            )
        else:
            possible.append(row)
    return possible, beyond


def _excluded(rows: Sequence[Row], order: int) -> Exclusions:
    mine = (row for row in rows if row["kind"] == "excluded" and row["order"] == order)
    return Exclusions(part for row in mine for part in row["examples"])


def _uncovered(run: Run, verdict: Verdict) -> Iterator[str]:
    """Follows steps and examples from row to row: each row must begin where the last one ended."""
    next_example: dict[int, int] = {}  # by data order
    exclusions: dict[int, Exclusions] = {}
    for row in run.rows:
        if row["kind"] == "taken":
            # Steps of a converted run: nothing is known about their examples.
            verdict.steps = verdict.elsewhere = row["step"]
        if row["kind"] != "fed":
            continue
        first_step, last_step, order = row["first_step"], row["step"], row["order"]
        if first_step != verdict.steps + 1:
            due = verdict.steps + 1
            yield f"the row of step {last_step} begins with step {first_step}, not {due}"
        verdict.steps = last_step
        if order not in exclusions:
            exclusions[order] = _excluded(run.rows, order)
        excluded = exclusions[order]
        where = f"of data order {order}, by the row of steps {first_step} to {last_step}"
        for first, end in row["examples"]:
            due = next_example.get(order, 0)
            if first < due:
                yield f"examples {first} to {min(end, due) - 1} {where}, were consumed again"
            # A gap is fine where all of its examples are excluded.
            if lost := excluded.kept(due, first) if first > due else []:
                yield f"examples {_listed(lost)} {where}, were never consumed"
            # `kept` cuts a range at exclusions; if it changes, excluded examples were consumed.
            if excluded.kept(first, end) != [[first, end]]:
                yield f"examples between {first} and {end} {where}, were consumed and are excluded"
            next_example[order] = max(due, end)


def _listed(ranges: Sequence[Sequence[int]]) -> str:
    return ", ".join(f"{first} to {end - 1}" for first, end in ranges)


def _recompute(
    run: Run, order: Row, consumed: Sequence[Row], begin: int, verdict: Verdict
) -> Iterator[str]:
    """Recomputes the batches of an order's rows, compares their hash sums, counts their examples.

    Args:
        begin: first example that is counted, unless a row has earlier ones.

    The loader yields the examples in ascending order, some thousands at a time. The ranges of the
    ledger's rows are sorted in the same way, so only the active ones, which overlap the current
    examples, are compared. In a sound ledger these are few; in a forged one they may overlap.
    """
    waiting = sorted(
        (
            (first, end, index)
            for index, row in enumerate(consumed)
            for first, end in row["examples"]
        ),
        reverse=True,  # the lowest range is the last element
    )
    begin, total_end = min(begin, waiting[-1][0]), max(end for _, end, _ in waiting)
    excluded = _excluded(run.rows, order["order"])
    sums = [0] * len(consumed)
    names = ("digest", "source", "epoch", "example", "filled")
    active: list[tuple[int, int, int]] = []
    with (
        run.loader(order, begin, total_end) as loader,
        Progress("verifying", total_end - begin) as progress,
    ):
        tallies = _tallies(order, loader.sources, verdict)
        for rows in columns(loader, names, total_end):
            start, size = int(rows["number"][0]), len(rows["number"])
            # A range becomes active when its first example has come, and stays so until its last.
            while waiting and waiting[-1][0] < start + size:
                active.append(waiting.pop())
            times = np.zeros(size, dtype=np.int64)
            for first, end, index in active:
                # Ranges [first, end) as positions in these rows; slicing cuts off what is beyond.
                inside = slice(max(first - start, 0), max(end - start, 0))
                sums[index] += int(rows["digest"][inside].sum())
                times[inside] += 1
            active = [each for each in active if each[1] > start + size]
            _count(rows, times, excluded, tallies)
            progress.advance(size)
    for row, total in zip(consumed, sums, strict=True):
        digest = f"{total % 2**64:016x}"
        if row["digest"] != digest:
            yield (
                f"steps {row['first_step']} to {row['step']} consumed other rows than those that "
                f"{run.dataset.name} gives for their examples: their sum is {row['digest']}, not "
                f"{digest}"
            )


def _tallies(order: Row, sources: Sequence[tuple[str, int]], verdict: Verdict) -> list[Tally]:
    """Returns the tally of each source, which other rows of the same order may have begun."""
    lanes, group = order["data"]["lanes"], order["data"].get("group_by_length")
    # With length groups, the end of an epoch is reached in whole pools.
    pool = group and GROUPS * group
    own_numbers = "group_by_source" in order["data"]
    return [
        verdict.tallies.setdefault((order["order"], name), Tally(size, lanes, pool, own_numbers))
        for name, size in sources
    ]


def _count(rows: Columns, times: Int64, excluded: Exclusions, tallies: Sequence[Tally]) -> None:
    """Adds consecutive examples, and how often each was consumed, to their sources' tallies."""
    start = int(rows["number"][0])
    skipped = rows["filled"] == 0  # examples of a corrupt shard come without content
    times = np.where(skipped, 0, times)
    for first, end in excluded.ranges:
        skipped[max(0, first - start) : max(0, end - start)] = True
    for source in np.unique(rows["source"]).tolist():
        here = rows["source"] == source
        of_source = {name: column[here] for name, column in rows.items()}
        tallies[source].add(of_source, times[here], skipped[here])


def report(verdict: Verdict, console: Console) -> None:
    """Prints a table of the passes, the exclusions, the problems, and the verdict in one line."""
    console.print(_table(verdict))
    for row in verdict.exclusions:
        if row["kind"] == "corrupt":
            examples = f"{row['first']} and later that are in {row['shard']}"
            dataset = row["dataset"][:12]
            reason = f"its bytes have changed; it is of the dataset of digest {dataset}..."
        else:
            examples, reason = _listed(row["examples"]), row["reason"]
        console.print(
            f"excluded from step {row['step']} on: examples {examples} of data order "
            f"{row['order']} ({reason})",
            markup=False,
        )
    for problem in verdict.problems[:_PROBLEMS_SHOWN]:
        console.print(problem, markup=False, style="red")
    if more := verdict.problems[_PROBLEMS_SHOWN:]:
        console.print(f"and {len(more)} more such findings", style="red")
    passes = [each for tally in verdict.tallies.values() for each in tally.passes.values()]
    consumed = sum(each.consumed for each in passes)
    said = f"{verdict.steps - verdict.elsewhere:,} steps consumed {consumed:,} examples"
    if verdict.elsewhere:
        said = (
            f"after {verdict.elsewhere:,} steps of another program, of which the ledger says "
            f"nothing, {said}"
        )
    if verdict.problems:
        console.print(f"NOT VERIFIED, for the reasons above; by what is left of the ledger, {said}")
    else:
        console.print(
            f"verified: {said}, each of a finished pass exactly once and of the last at most once"
        )


def _table(verdict: Verdict) -> Table:
    """Returns a table of the passes; consecutive passes with the same numbers share a line."""
    several = len({source for _, source in verdict.tallies}) > 1
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    names = ("passes", "examples", "consumed", "excluded", "lost", "repeated")
    for name in ("order", *["source"] * several, *names):
        table.add_column(name, justify="right")
    for (order, source), tally in verdict.tallies.items():

        def counts(number: int, tally: Tally = tally) -> tuple[str, ...]:
            each = tally.passes[number]
            lost = each.missing if tally.is_over(number) else 0
            numbers = (tally.size, each.consumed, each.excluded, lost, each.repeated)
            return tuple(f"{number:,}" for number in numbers)

        # A thousand equal epochs are one line: "1 to 1000".
        for cells, group in itertools.groupby(sorted(tally.passes), counts):
            numbers = list(group)
            first, last = numbers[0], numbers[-1]
            passes = f"{first + 1}" if first == last else f"{first + 1} to {last + 1}"
            passes += "" if tally.is_over(last) else ", under way"
            table.add_row(str(order), *[source] * several, passes, *cells)
    return table
