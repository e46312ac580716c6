"""made = trained + queued + dropped + in flight, for every maker; a sample counts once."""

from __future__ import annotations

import pytest

from trainer.detached.ledger import QUEUED, Ledger
from verl_like.errors import LedgerError
from workers.agents.loop import GIVEN_UP


def filled() -> Ledger:
    """Maker 0 made a, b and c; a is trained, b queued, c in flight; maker 1 lost d."""
    ledger = Ledger()
    ledger.begin(0, ["a", "b", "c"], 2)
    ledger.begin(1, ["d"], 2)
    ledger.move(["a", "b"], QUEUED)
    ledger.trained("a", [0, 1], [3, 4], version=5)
    ledger.drop(["d"], "lost with its maker")
    return ledger


def test_every_sample_is_somewhere() -> None:
    ledger = filled()
    ledger.check()
    row = ledger.as_dict()["makers"]["0"]
    assert row == {"made": 6, "trained": 2, "queued": 2, "dropped": {}, "in_flight": 2}
    assert ledger.as_dict()["makers"]["1"]["dropped"] == {"lost with its maker": 2}


def test_trainers_and_ages_are_counted_by_sample() -> None:
    kept = filled().as_dict()
    assert kept["trainers"] == {"0": 1, "1": 1}
    assert kept["staleness"] == {"1": 1, "2": 1}
    assert kept["versions"] == {"3": 1, "4": 1}


def test_what_is_open_cannot_be_made_again_and_what_is_done_not_trained_again() -> None:
    ledger = filled()
    with pytest.raises(LedgerError, match="uid b are queued already, and maker 1"):
        ledger.begin(1, ["b"], 2)
    with pytest.raises(LedgerError, match="uid a, or they are done"):
        ledger.trained("a", [0, 1], [3, 4], version=5)


def test_a_ledger_that_does_not_add_up_is_refused() -> None:
    ledger = filled()
    ledger.makers[0].made += 1
    with pytest.raises(LedgerError, match="maker 0: the ledger does not add up"):
        ledger.check()


def test_a_resume_drops_what_was_open_with_its_reason() -> None:
    ledger = Ledger()
    ledger.load_state_dict(filled().as_dict())
    ledger.check()
    assert ledger.makers[0].dropped == {"made again after a resume": 4}
    ledger.begin(0, ["b"], 2)


def test_the_table_has_a_line_a_maker_and_the_reasons() -> None:
    text = filled().describe()
    assert text.splitlines()[1].split() == ["maker", "0", "6", "2", "2", "0", "2"]
    assert text.splitlines()[3].split() == ["all", "8", "2", "2", "2", "2"]
    assert "dropped: 2 (lost with its maker)" in text


def test_makers_stand_in_their_order_whoever_began_first() -> None:
    ledger = Ledger()
    ledger.begin(1, ["a"], 2)
    ledger.begin(0, ["b"], 2)
    assert list(ledger.as_dict()["makers"]) == ["0", "1"]
    assert [line.split()[1] for line in ledger.describe().splitlines()[1:3]] == ["0", "1"]


def with_tokens() -> Ledger:
    """A group was trained on, one is queued, one was pushed out; 5 tokens were given up."""
    ledger = Ledger()
    ledger.begin(0, ["a", "b", "c"], 2)
    ledger.queue({"a": 10, "b": 20}, {GIVEN_UP: 5})
    ledger.queue({"c": 40}, {})
    ledger.drop(["c"], "pushed out of the full buffer")
    ledger.trained("a", [0, 0], [3, 4], version=5)
    ledger.tokens_trained(7, {"on_failure=skip": 3})
    return ledger


def test_every_token_is_somewhere() -> None:
    assert with_tokens().as_dict()["tokens"] == {
        **{"trained": 7, "queued": 20},
        "left_out": {
            "in an environment that failed": 5,
            "pushed out of the full buffer": 40,
            "on_failure=skip": 3,
        },
    }
    words = "tokens: 75 drawn = 7 trained + 20 queued + 48 left out (in an environment that failed"
    assert words in with_tokens().describe()


def test_a_token_that_is_lost_in_a_step_is_told() -> None:
    ledger = with_tokens()
    ledger.trained("b", [0, 0], [3, 4], version=5)
    with pytest.raises(LedgerError, match="have 20 tokens, and 16 were trained on"):
        ledger.tokens_trained(16, {"on_failure=skip": 3})


def test_tokens_that_were_queued_are_restored_or_made_again_after_a_resume() -> None:
    ledger = Ledger()
    ledger.load_state_dict(with_tokens().as_dict())
    assert ledger.left_out["made again after a resume"] == 20
    ledger.restore(0, {"b": 20}, 2)
    assert ledger.as_dict() == with_tokens().as_dict()
