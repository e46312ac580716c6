"""What became of the samples of a run with faults on purpose, as a ledger that must close.

    made = trained + dropped (by reason)

A recipe counts where it makes samples and where it hands them to an update, each on its own, so
that a sample that is lost or doubled between the two shows.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from verl_like.errors import LedgerError

MADE, TRAINED = "made", "trained"


class SampleLedger:
    """That of one run, by step: a step that is made again makes its samples again, too."""

    def __init__(self) -> None:
        """Nothing is made yet."""
        self._steps: dict[int, Counter[str]] = {}
        self._lost: Counter[str] = Counter()
        """Of steps that came to nothing."""

    def count(self, step: int, became: dict[str, int]) -> None:
        """So many samples of the step were `MADE`, `TRAINED`, or dropped for a reason."""
        self._steps.setdefault(step, Counter()).update(became)

    def drop_after(self, step: int, reason: str) -> None:
        """What later steps made came to nothing."""
        for later in [number for number in self._steps if number > step]:
            num_made = self._steps.pop(later)[MADE]
            self._lost.update({MADE: num_made, reason: num_made})

    def close(self) -> dict[str, Any]:
        """The whole run's numbers, none where no samples were made; raise if a step's do not add
        up.
        """
        for step, became in self._steps.items():
            if 2 * became[MADE] != became.total():
                raise LedgerError(
                    f"the samples of step {step} of a run with faults on purpose do not add up: "
                    f"{became.pop(MADE)} were made, {dict(became)}."
                )
        total = sum(self._steps.values(), +self._lost)
        if not total:
            return {}
        made, trained = total.pop(MADE), total.pop(TRAINED, 0)
        return {MADE: made, TRAINED: trained, "dropped": dict(total)}
