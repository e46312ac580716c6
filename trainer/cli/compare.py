"""`verl-like compare RUN RUN ...`: runs side by side, on the terminal and as a page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.compare.page import PAGE, write_comparison
from trainer.compare.runs import read_runs
from trainer.compare.tables import comparison_text
from verl_like.terminal import terminal_width


def main(arguments: Sequence[str]) -> None:
    """Print the tables, write the page."""
    parser = argparse.ArgumentParser("verl-like compare", description=__doc__)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run folder")
    parser.add_argument("--page", default=PAGE, help="the page to write")
    options = parser.parse_args(arguments)

    runs = read_runs(options.runs)
    print(comparison_text(runs, terminal_width()))
    print(f"\ncomparison: {write_comparison(runs, Path(options.page))}")
