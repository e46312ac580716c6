"""Draw the pictures of the report in the docs: `python docs/draw_report.py RUN SPLIT_RUN`.

`report.svg` has curves of RUN, and `gantt.svg` the last steps of SPLIT_RUN, as the report draws
them. Text is gray, so that it can be read on a light and on a dark page. A test compares the
titles, metrics and methods in the pictures with those of the code.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from trainer.tools.report.figures import curves, known_panels, timeline
from trainer.tools.report.read import RunData, last_steps, read_run, without_pauses

IMAGES = Path(__file__).resolve().parent / "images"
SHOWN = ("Reward", "KL", "Entropy", "Lengths", "Gradient norms", "Clipped")
WIDTH, HEIGHT, COLUMNS = 320, 230, 3


def grayed(svg: str) -> str:
    """Return a figure whose text, ticks and dark bars are gray."""
    return re.sub("#000000|#222222", "#808080", svg.replace("<text ", '<text fill="#808080" '))


def report_svg(data: RunData) -> str:
    """Return panels of the report in a grid, with their titles."""
    parts = []
    panels = [panel for panel in known_panels() if panel.title in SHOWN]
    for number, panel in enumerate(panels):
        x, y = WIDTH * (number % COLUMNS), HEIGHT * (number // COLUMNS)
        parts.append(
            f'<text class="title" x="{x + 20}" y="{y + 16}" fill="#808080" '
            f'font-family="sans-serif" font-weight="bold">{panel.title}</text>'
        )
        place = f'x="{x}" y="{y + 22}" width="{WIDTH}" height="{HEIGHT - 26}"'
        svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", curves(data.metrics, panel), count=2)
        parts.append(grayed(svg.replace("<svg", f"<svg {place}", 1)))
    height = HEIGHT * -(-len(panels) // COLUMNS)
    view = f'viewBox="0 0 {WIDTH * COLUMNS} {height}"'
    body = "\n".join(parts)
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>\n{body}\n</svg>\n'


def main() -> None:
    """Write both pictures."""
    run, split_run = map(read_run, sys.argv[1:])
    (IMAGES / "report.svg").write_text(report_svg(run), encoding="utf-8")
    calls, cuts = without_pauses(last_steps(split_run.calls, 2))
    (IMAGES / "gantt.svg").write_text(grayed(timeline(calls, cuts)), encoding="utf-8")


if __name__ == "__main__":
    main()
