"""Tables of the scores of each class, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table

from trainer.metrics.per_class import MOST_SHOWN, ClassReport


def tables(report: ClassReport) -> Iterator[Table]:
    """Yields the scores of classes, and the confusion matrix or the largest confusions."""
    scores = _table("Classes", "", "precision", "recall", "F1", "support")
    for name, row in report.classes.items():
        scores.add_row(name, *_cells(row.precision, row.recall, row.f1), f"{row.support:,}")
    scores.add_section()  # a line before the averages
    for name, row in report.averages.items():
        cells = _cells(row.precision, row.recall, row.f1)
        scores.add_row(f"{name} average", *cells, f"{row.support:,}")
    yield scores
    if report.confusion is None:
        return
    if len(report.classes) > MOST_SHOWN:
        largest = _table("Largest confusions", "label", "prediction", "rows")
        for each in report.largest():
            largest.add_row(each.label, each.prediction, f"{each.count:,}")
        yield largest
        return
    matrix = _table("Confusion matrix", "label", *report.classes)
    for name, counts in zip(report.classes, report.confusion.tolist(), strict=True):
        matrix.add_row(name, *(f"{count:,}" for count in counts))
    yield matrix


def _table(title: str, *headers: str) -> Table:
    table = Table(title=title, title_justify="left")
    for header in headers:
        is_text = header in ("", "label", "prediction")
        table.add_column(header, justify="left" if is_text else "right")
    return table


def _cells(*values: float) -> list[str]:
    return [f"{value:.4f}" for value in values]
