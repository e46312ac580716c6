"""The report in headless Chromium: no console errors, all figures, no overflow, dark mode."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.trainer.tools.report.report_runs import make_played_run, make_run
from trainer.tools.report.figures import known_panels
from trainer.tools.report.page import write_report

pytestmark = pytest.mark.usefixtures("figures")

BROWSER = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
PROBE = """
<script>
window.addEventListener("load", () => {
  const box = document.querySelector("[data-searches=samples]");
  box.value = "say b";
  box.dispatchEvent(new Event("input"));
  const figures = [...document.querySelectorAll("figure svg")];
  const drawn = figures.filter(svg => svg.getBoundingClientRect().height > 40);
  document.body.dataset.seen = JSON.stringify({
    width: window.innerWidth, page: document.documentElement.scrollWidth, figures: drawn.length,
    table: document.querySelector("#samples").closest(".tall").getBoundingClientRect().height,
    dark: [getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color],
    rows: document.querySelectorAll(
      "#samples tbody tr:not([hidden]), #samples > details:not([hidden])"
    ).length,
    shades: [...new Set([...document.querySelectorAll(".turn")].map(
      turn => getComputedStyle(turn).backgroundColor
    ))],
    shares: [...document.querySelectorAll("#phases td:last-child")].map(
      cell => parseFloat(cell.textContent)
    ),
  });
});
</script>
"""

READ_FRAMES = """
window.addEventListener("load", () => {
  const shown = document.createElement("pre");
  const frames = [...document.querySelectorAll("iframe")];
  const seen = frames.map(frame => frame.contentDocument.body.dataset.seen);
  shown.textContent = `[${seen.join()}]`;
  document.body.append(shown);
});
"""
WIDTHS = (375, 1280)
"""In pixels, of a telephone and of a desk's screen."""


@pytest.mark.long
@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; on Debian: apt-get install chromium")
def test_the_report_renders_in_a_browser(tmp_path: Path) -> None:
    """Responses and trajectories: both pages in both widths, in one browser."""
    frames = []
    for number, make in enumerate((make_run, make_played_run)):
        page = write_report(make(tmp_path / f"run{number}", 5))
        (tmp_path / f"page{number}.html").write_text(page.read_text() + PROBE)
        for width in WIDTHS:
            style = f"width:{width}px;height:900px;border:0"
            frames.append(f'<iframe src="page{number}.html" style="{style}"></iframe>')
    probed = tmp_path / "probed.html"
    body = f"{''.join(frames)}<script>{READ_FRAMES}</script>"
    probed.write_text(f"<!doctype html><body>{body}</body>")
    done = subprocess.run(
        [
            BROWSER, "--headless", "--no-sandbox", "--disable-gpu",
            "--allow-file-access-from-files",
            f"--user-data-dir={tmp_path}/profile", f"--window-size={max(WIDTHS)},1000",
            "--enable-logging=stderr", "--blink-settings=preferredColorScheme=0",
            "--v=0", "--virtual-time-budget=10000", "--dump-dom", probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert re.findall(r".*CONSOLE.*", done.stderr) == []
    pages = json.loads(re.search(r"<pre>(.*)</pre>", done.stdout)[1])
    assert tuple(seen["width"] for seen in pages) == WIDTHS * 2
    for number, seen in enumerate(pages):
        is_played = number >= len(WIDTHS)
        assert seen["page"] <= seen["width"]
        panels = [panel for panel in known_panels() if not panel.only_if_there]
        assert seen["figures"] == len(panels) + 2 + is_played
        assert seen["rows"] == 5 * (2 if is_played else 4)
        assert seen["shades"] == (["rgb(42, 42, 42)", "rgb(31, 58, 82)"] if is_played else [])
        assert seen["table"] < 600, "the table scrolls in its own box"
        assert seen["dark"] == ["rgb(22, 22, 22)", "rgb(232, 232, 232)"]
        assert sum(seen["shares"]) == pytest.approx(100)
