"""A maker loses a rank while it generates: what the other ranks make of the piece stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import POLICY_ALONE, overrides
from tests.trainer.detached.stand_ins import begin, finish, make_buffer
from tests.trainer.detached.test_run import LOCAL, detached, ledger_of, shared_numbers
from trainer import load_config, run
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.ledger import LOST, TOO_OLD
from trainer.detached.samplers import Experience
from workers.rollout.client import Submission

TWO_RANKS = (
    "resource_pool_spec={trainer_pool: [1], maker_0_pool: [2]}",
    "trainer.n_gpus_per_node=3",
    "trainer.device=cpu",
    "role_workers.rollout=tests.trainer.detached.rigged_workers.DiesOnce",
)


def half_made(buffer: ExperienceBuffer) -> Experience:
    """Maker 0 is lost with a piece of two prompts, of which it has made the second one's sample."""
    piece = begin(buffer, maker=0)
    assert piece.rows is not None
    piece.submission = Submission(piece.rows)
    piece.submission.add([1], piece.rows[1:2])
    assert buffer.lost(0, keeps=True) == 1
    return piece


def test_whoever_makes_the_piece_again_gets_what_is_there_of_it() -> None:
    buffer = make_buffer(max_staleness=4)
    lost = half_made(buffer)
    again = begin(buffer, maker=1)
    assert again is lost
    assert again.submission is not None
    assert again.submission.missing == [0]
    finish(buffer, again)
    assert begin(buffer, maker=1).submission is None


def test_the_ledger_counts_what_was_kept_for_the_maker_of_the_rest() -> None:
    buffer = make_buffer(max_staleness=4)
    half_made(buffer)
    finish(buffer, begin(buffer, maker=1))
    buffer.ledger.check()
    first, second = buffer.ledger.makers[0], buffer.ledger.makers[1]
    assert (first.made, first.dropped) == (1, {LOST: 1})
    assert (second.made, second.dropped) == (2, {})


def test_a_piece_of_which_a_part_is_older_is_as_old_as_that() -> None:
    buffer = make_buffer(max_staleness=4)
    half_made(buffer)
    buffer.publish(2)
    assert begin(buffer, maker=1).version == 1


def test_what_would_be_too_old_by_now_is_made_again_too() -> None:
    buffer = make_buffer(max_staleness=1, batch=2)
    half_made(buffer)
    buffer.publish(3)
    again = begin(buffer, maker=0)
    assert (again.submission, again.version) == (None, 3)
    buffer.ledger.check()
    account = buffer.ledger.makers[0]
    assert (account.made, account.dropped) == (4, {LOST: 1, TOO_OLD: 1})


def test_a_maker_that_loses_a_rank_makes_that_ranks_samples_alone_again_to_the_same_numbers(
    tiny_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run(load_config(overrides(tiny_dir, tmp_path / "plain", LOCAL, *POLICY_ALONE)))
    more = ("detached.max_staleness=0", "detached.on_maker_loss=restart", *TWO_RANKS)
    with caplog.at_level("WARNING"):
        folder = detached(tiny_dir, tmp_path / "detached", *POLICY_ALONE, *more)
    assert shared_numbers(folder) == shared_numbers(tmp_path / "plain")
    assert "maker 0: 8 samples of the lost group are kept, 8 are made again." in caplog.text
    (maker,) = ledger_of(folder)["makers"].values()
    assert (maker["made"], maker["trained"], maker["dropped"]) == (56, 48, {LOST: 8})
