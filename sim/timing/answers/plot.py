"""Draws step time against a knob."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from sim.timing.answers.whatif import Row

FORMATS: Final = (".svg", ".png")


class PlotError(ValueError):
    """A plot that cannot be drawn: the message says what is missing."""


def check_plot(path: Path, knobs: Sequence[str]) -> None:
    """Says what is in the way of a plot before the variants are timed.

    Raises:
        PlotError: The file has another ending, there is nothing to draw, or matplotlib is missing.
    """
    if path.suffix not in FORMATS:
        raise PlotError(f"Expected --plot to end in {' or '.join(FORMATS)}, got {path}.")
    if not knobs:
        raise PlotError("Expected at least one --set with --plot, got none.")
    try:
        import matplotlib  # noqa: F401 - asked for early, since variants can take minutes
    except ImportError:
        raise PlotError(
            "Expected matplotlib for --plot, got none; `.venv/bin/pip install matplotlib`."
        ) from None


def draw(path: Path, rows: Sequence[Row], *, title: str) -> None:
    """Writes a plot: the first knob along the bottom, a line for each setting of the others.

    Raises:
        PlotError: The file cannot be written.
    """
    import matplotlib

    matplotlib.use("agg")
    matplotlib.rcParams["svg.hashsalt"] = "sim"  # equal rows, equal bytes
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2), layout="constrained")
    knob = next(iter(rows[1].variant.values))
    for label, points in _lines(rows[1:], knob).items():
        words = [x if isinstance(x, (int, float)) else str(x) for x, _ in points]
        times = [row.numbers["step_ms"] for _, row in points]
        (line,) = axes.plot(words, times, marker="o", label=label or None)
        axes.fill_between(
            words,
            [row.numbers["step_ms"] - row.band_ms for _, row in points],
            [row.numbers["step_ms"] + row.band_ms for _, row in points],
            color=line.get_color(),
            alpha=0.15,
            linewidth=0,
        )
    axes.axhline(rows[0].numbers["step_ms"], color="grey", linewidth=0.8, label="as recorded")
    axes.set(xlabel=knob, ylabel="step time (ms)", title=title)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise PlotError(f"Expected a file to write to, got {path}: {error.strerror}.") from None
    finally:
        pyplot.close(figure)


def _lines(rows: Sequence[Row], knob: str) -> dict[str, list[tuple[Any, Row]]]:
    lines: dict[str, list[tuple[Any, Row]]] = {}
    for row in rows:
        value = row.variant.values[knob]
        x = str(value) if isinstance(value, bool) else value
        others = {name: other for name, other in row.variant.values.items() if name != knob}
        label = " ".join(f"{name}={other}" for name, other in others.items())
        lines.setdefault(label, []).append((x, row))
    return lines
