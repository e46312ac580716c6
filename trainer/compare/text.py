"""A comparison on the terminal: `verl-like compare`, and the end of `--multirun`."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.compare import tables
from trainer.compare.runs import ComparedRun
from verl_like.terminal import draw_table, fit

SAME = "The configurations are the same."
END = "Ends are means of the last tenth of a metric's values; ± is the deviation over the seeds."


def comparison_text(runs: Sequence[ComparedRun], width: int | None) -> str:
    """Every table under its title, no wider than `width`."""
    sections = {
        "Runs": draw_table(tables.overview(runs), width),
        "What is set differently": _drawn(tables.differences(runs), width) or [SAME],
        "What came out": [*_drawn(tables.results(runs), width), END],
        "Where the time of a step went": _drawn(tables.phases(runs), width),
    }
    for names, rows in tables.placements(runs):
        sections[f"Placement of {names}"] = _drawn(rows, width, num_titles=len(rows[0]))

    blocks = []
    for title, lines in sections.items():
        if lines:
            blocks.append("\n".join([title, "-" * len(title), *lines]))
    return fit("\n\n".join(blocks), width)


def _drawn(rows: tables.Rows, width: int | None, num_titles: int = 1) -> list[str]:
    return draw_table(rows, width, num_titles, flush_right=True) if rows else []
