"""What `verl-like doctor` prints: a line for each thing that it looked at."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass

from verl_like.terminal import fit, print_or_end, terminal_width


@dataclass(frozen=True)
class Finding:
    """One line: what was looked at, how it is, and for a failure the command that mends it."""

    subject: str
    detail: str
    mend: str = ""
    is_optional: bool = False

    def __str__(self) -> str:
        mark = "ok  " if not self.mend else "-   " if self.is_optional else "FAIL"
        return f"{mark}  {self.subject:<14}{self.detail}" + (f" → {self.mend}" if self.mend else "")


def show(found: Iterable[Finding], passed: str) -> None:
    """Print every finding as it comes; exit code 1 if a needed thing fails."""
    failed = 0
    for finding in found:
        print_or_end(fit(str(finding), terminal_width(), "      "))
        failed += bool(finding.mend) and not finding.is_optional
    print_or_end(f"{failed} of these fail; each line ends with what mends it" if failed else passed)
    sys.exit(bool(failed))
