"""A comparison as one page that needs no other files: curves on one axis, and tables."""

from __future__ import annotations

import glob
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.compare import tables
from trainer.compare.runs import ComparedRun
from trainer.report import figures
from trainer.report.figures import COLOURS, Panel
from trainer.report.page import page_of
from verl_like.errors import ConfigError
from verl_like.files import write_whole

PAGE = "comparison.html"
TEMPLATE = Path(__file__).with_name("template.html")


def write_comparison(runs: Sequence[ComparedRun], path: Path) -> Path:
    """Write the page atomically."""
    page = page_of(TEMPLATE).render(_content(runs))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, page)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written ({error}); name another --page.") from error
    return path


def _content(runs: Sequence[ComparedRun]) -> dict[str, Any]:
    """Return the template's values."""
    from markupsafe import Markup

    drawn = {metric: curves_of(runs, metric) for metric in tables.metrics_shown(runs)}
    return {
        "names": [run.name for run in runs],
        "num_drawn": min(len(runs), len(COLOURS)),
        "curves": {metric: Markup(svg) for metric, svg in drawn.items() if svg},
        "overview": tables.overview(runs),
        "differences": tables.differences(runs),
        "same": tables.SAME,
        "results": tables.results(runs),
        "end": tables.END,
        "phases": tables.phases(runs),
        "placements": tables.placements(runs),
    }


def curves_of(runs: Sequence[ComparedRun], metric: str) -> str:
    """Return one metric of the runs on one axis, as SVG; as many runs as there are colours."""
    lines: list[dict[str, float]] = []
    shown = [run for run in runs if run.data.series(metric)[0]][: len(COLOURS)]
    for run in shown:
        for step, value in zip(*run.data.series(metric), strict=True):
            lines.append({"step": step, run.name: value})
    if not lines:
        return ""
    # the report's figure treats each run as a metric of one run
    return figures.curves(lines, Panel(metric, "", tuple(glob.escape(run.name) for run in shown)))
