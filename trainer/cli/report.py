"""usage: verl-like report RUN_DIR

Writes RUN_DIR/report.html: one file that opens in any browser without a
network. A run writes its report when it ends, even if it fails. This command
writes it again, even for a run in progress.

  verl-like report runs/verl_like/ppo
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from trainer.tools.report.page import write_report


def main(arguments: Sequence[str]) -> None:
    """Write the page, and print its path."""
    if len(arguments) != 1:
        sys.exit(__doc__)
    print(write_report(arguments[0]))
