"""Every sample of a run with faults on purpose was trained on, or dropped for a reason."""

from __future__ import annotations

import pytest

from trainer.chaos import SampleLedger
from verl_like.errors import LedgerError


def test_samples_of_steps_that_came_to_nothing_are_dropped_with_them() -> None:
    ledger = SampleLedger()
    for step in (1, 2, 3):
        ledger.count(step, {"made": 4})
        ledger.count(step, {"trained": 3, "cut": 1})
    ledger.count(4, {"made": 4})
    ledger.drop_after(2, "step made again")
    ledger.count(3, {"made": 4, "trained": 4})
    assert ledger.close() == {
        **{"made": 20, "trained": 10},
        "dropped": {"step made again": 8, "cut": 2},
    }


@pytest.mark.parametrize("became", [{"trained": 3}, {"trained": 4, "cut": 1}, {}])
def test_a_step_whose_samples_do_not_add_up_is_named(became: dict[str, int]) -> None:
    ledger = SampleLedger()
    ledger.count(7, {"made": 4, "trained": 4})
    ledger.count(8, {"made": 4, **became})
    with pytest.raises(LedgerError, match="samples of step 8 .*: 4 were made"):
        ledger.close()


def test_a_run_without_samples_has_no_numbers_of_them() -> None:
    ledger = SampleLedger()
    ledger.drop_after(0, "step made again")
    assert ledger.close() == {}
