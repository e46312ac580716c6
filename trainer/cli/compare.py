"""usage: verl-like compare RUN RUN ... [--page FILE]

Compares two or more run folders, in any state:

  verl-like compare runs/a runs/b --page a_b.html

Prints how each run ended, the keys that differ, the last and the best value of
every metric (mean and deviation of runs that differ only in trainer.seed), the
phases of a step, and the placements. The page FILE (default: comparison.html in
the current folder) has the same tables and every curve of all runs on one axis.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from trainer.tools.compare.tables import PAGE, comparison_text, read_runs, write_comparison
from verl_like.terminal import usage_of


def main(arguments: Sequence[str]) -> None:
    """Print the tables, and write the page."""
    parser = argparse.ArgumentParser("verl-like compare", usage_of(__doc__))
    parser.add_argument("runs", nargs="+", metavar="RUN")
    parser.add_argument("--page", default=PAGE)
    options = parser.parse_args(arguments)

    runs = read_runs(options.runs)
    print(comparison_text(runs))
    print(f"\ncomparison: {write_comparison(runs, Path(options.page))}")
