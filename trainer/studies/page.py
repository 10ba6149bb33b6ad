"""The page of a study, as HTML and as Markdown."""

from __future__ import annotations

import math
import re
import shutil
import textwrap
from collections.abc import Sequence
from pathlib import Path

from samestep.errors import ConfigError
from samestep.storage import write_text
from trainer.studies.results import Cost, Results, Row
from trainer.studies.statistics import Estimate, Share, detectable
from trainer.studies.study import Comparison, Measure
from trainer.studies.template import render

_BEGIN, _END = "<!-- results -->", "<!-- /results -->"
_MINUS = "\N{MINUS SIGN}"


def write_html(results: Results, plots: Sequence[Path], file: Path) -> None:
    """Writes a page that needs no other file."""
    config = results.study.config
    text = render(
        "page.html",
        title=results.study.name.replace("_", " "),
        config=config,
        headings=headings(results),
        lines=[[_plain(text) for text in line] for line in lines(results)],
        notes=[_plain(note) for note in notes(results)],
        cost_headings=_COST_HEADINGS,
        costs=_cost_lines(results),
        # SVG without its XML header, inside of the page.
        plots=[re.sub(r"^.*?(?=<svg)", "", plot.read_text("utf-8"), flags=re.S) for plot in plots],
    )
    write_text(file, text)


def write_markdown(results: Results, plots: Sequence[Path], file: Path) -> None:
    """Puts the results into a page, between two lines `<!-- results -->` and `<!-- /results -->`.

    People write the rest of the page, about the results, and it stays. Plots go to the folder
    images/ next to the page.

    Raises:
        ConfigError: the page has not both lines.
    """
    page = f"# {results.study.config.question}\n\n{_BEGIN}\n{_END}\n"
    if file.exists():
        page = file.read_text(encoding="utf-8")
    found = _place(page, file)
    images = file.parent / "images"
    images.mkdir(parents=True, exist_ok=True)
    shown = []
    for plot in plots:
        copy = images / f"{results.study.name}-{plot.name}"
        shutil.copyfile(plot, copy)
        shown.append(f"![{plot.stem.replace('_', ' ')}]({images.name}/{copy.name})")
    figure = f"To compare with: {results.study.config.figure}."
    parts = [
        _table(headings(results), lines(results)),
        *(textwrap.fill(note, 120, break_on_hyphens=False) for note in (figure, *notes(results))),
        "\n".join(shown),
        _table(_COST_HEADINGS, _cost_lines(results)),
    ]
    text = "\n\n".join(part for part in parts if part)
    write_text(file, f"{page[: found.start()]}\n{text}\n\n{page[found.end() :]}")


def check_markdown(file: Path) -> None:
    """Checks that a page, if it exists, has a place for the results, before they are computed.

    Raises:
        ConfigError: it has none.
    """
    if file.exists():
        _place(file.read_text(encoding="utf-8"), file)


def _place(page: str, file: Path) -> re.Match[str]:
    found = re.search(f"(?<={_BEGIN}\n).*?(?={_END})", page, re.DOTALL)
    if found is None:
        raise ConfigError(f"{file} has no lines {_BEGIN} and {_END}. Add them where results go.")
    return found


def headings(results: Results) -> list[str]:
    """The arm, and for each measure its mean and the difference from the baseline."""
    names = ["arm"]
    for name, measure in results.study.config.measures.items():
        names += [f"{name}{', %' * measure.percent}", f"against {results.study.baseline}"]
    return names


def lines(results: Results) -> list[list[str]]:
    """A line for each arm that has results; differences that exclude zero are bold."""
    found = []
    for arm in results.study.config.arms:
        line = [arm]
        for name, measure in results.study.config.measures.items():
            row = next((row for row in results.of(name) if row.arm == arm), None)
            line += ["", ""] if row is None else [_mean(row, measure), _difference(row, measure)]
        if any(line[1:]):
            found.append(line)
    return found


def notes(results: Results) -> list[str]:
    """Sentences that a reader of the table needs."""
    config = results.study.config
    found = [
        f"Means over {config.seeds} seed{'s' * (config.seeds > 1)}, with the standard deviation. "
        f"Differences from {results.study.baseline} are paired by seed: both arms have the same "
        "data order, masks, initial weights and dropout where their settings agree. In brackets: "
        "95 % interval, over seeds (Student's t)"
        + (" and held-out rows (bootstrap)" if any(row.rows for row in results.rows) else "")
        + "; bold if it excludes zero. Each comparison stands alone: of 20 arms without any "
        "effect, one is bold."
    ]
    missing = [
        f"{arm} {done} of {config.seeds}"
        for arm, done in results.finished.items()
        if done < config.seeds
    ]
    if missing:
        found.append(f"Not all jobs are finished. Finished seeds: {', '.join(missing)}.")
    stated = config.primary
    if stated is not None:
        measure = config.measures[stated.measure]
        text = f"Primary comparison: {_named(stated)}."
        if config.seeds > 1:
            detects = detectable(stated.pilot_deviation, config.seeds)
            text += (
                " With an assumed standard deviation of the paired difference of "
                f"{_number(stated.pilot_deviation, measure)}, {config.seeds} seeds detect a "
                f"difference of {_number(detects, measure)} in 80 of 100 cases."
            )
        if results.primary is not None:
            text += f" Found: {_estimate(results.primary, measure)}."
            text += _pairing(results.primary, results.unpaired_deviation, measure)
        found.append(text)
    compared = [
        f"{_named(stated)} {_estimate(difference, config.measures[stated.measure])}"
        for stated, difference in results.comparisons
    ]
    if compared:
        found.append(f"Further comparisons: {'; '.join(compared)}.")
    if results.calibration is not None:
        found.append(_calibration(results.calibration, config.calibrate))
    return found


def _named(stated: Comparison) -> str:
    return f"{stated.arms[1]} against {stated.arms[0]} in {stated.measure}"


def _pairing(primary: Estimate, unpaired: float | None, measure: Measure) -> str:
    if primary.deviation is None or unpaired is None:
        return ""
    paired = _number(primary.deviation, measure)
    return f" Pairing took the deviation from {_number(unpaired, measure)} to {paired}."


def _calibration(share: Share, seeds: int | None) -> str:
    low, high = (f"{100 * end:.1f}" for end in (share.low, share.high))
    return (
        f"Cut into {share.cases} studies of {seeds} seeds: the interval of the primary comparison "
        f"excludes zero in {share.count} of them, {100 * share.count / share.cases:.1f} % "
        f"[{low}, {high}] (in brackets: 95 % interval of Clopper and Pearson)."
    )


_COST_HEADINGS = ["arm", "jobs", "FLOPs", "wall time, h", "CPU time, h", "kWh", "CO2, g"]


def _cost_lines(results: Results) -> list[list[str]]:
    lines = [_cost_line(cost.arm, cost) for cost in results.costs]
    return [*lines, _cost_line("all, each job once", results.total)]


def _cost_line(name: str, cost: Cost) -> list[str]:
    return [
        name,
        str(cost.jobs),
        f"{cost.flops:.2e}",
        f"{cost.usage.seconds / 3600:.2f}",
        f"{cost.usage.cpu_seconds / 3600:.2f}",
        f"{cost.kwh:.4f}",
        f"{cost.grams:.1f}",
    ]


def _mean(row: Row, measure: Measure) -> str:
    if measure.minus is not None:  # a difference itself
        return _estimate(row.mean, measure)
    text = _number(row.mean.mean, measure)
    if not row.mean.deviation:  # one seed, or the same number for all, as a size
        return text
    return f"{text} ± {_number(row.mean.deviation, measure)}"


def _difference(row: Row, measure: Measure) -> str:
    if row.difference is None:
        return ""
    return _estimate(row.difference, measure)


def _estimate(estimate: Estimate, measure: Measure) -> str:
    text = _signed(estimate.mean, measure)
    if estimate.low is None or estimate.high is None or estimate.is_exact:
        return text
    text += f" [{_signed(estimate.low, measure)}, {_signed(estimate.high, measure)}]"
    return f"**{text}**" if estimate.excludes_zero else text


def _number(value: float, measure: Measure) -> str:
    if math.isnan(value):
        return "not finite"
    if measure.percent:
        return f"{100 * value:.1f}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3f}"


def _signed(value: float, measure: Measure) -> str:
    sign = _MINUS if value < 0 else "+" * (value >= 0)  # NaN has none
    return sign + _number(abs(value), measure)


def _plain(text: str) -> str:
    return text.replace("**", "")


def _table(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    ruler = ["---", *["---:"] * (len(names) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (names, ruler, *rows))
