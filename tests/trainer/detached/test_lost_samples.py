"""Samples that were queued on a machine which is gone: their prompts are answered again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.trainer.detached.stand_ins import begin, finish, make_buffer, train
from trainer.detached.buffer import ExperienceBuffer
from trainer.detached.experience import Experience
from trainer.detached.ledger import LOST
from trainer.detached.losses import MakerLosses
from trainer.detached.source import DetachedSource, Rounds
from trainer.ppo.sample_source import Draw, Samples
from verl_like.errors import RolloutError, WorkerDiedError


class Gone:
    """The future of samples that a lost machine held."""

    def get(self) -> None:
        raise WorkerDiedError("the machine that held the answer is gone")


class MakesAgain:
    """A maker that answers, when samples are lost, what is handed out anew."""

    def __init__(self, buffer: ExperienceBuffer) -> None:
        self.buffer = buffer
        self.lost: list[Experience] = []

    def start(self) -> None:
        """Two pieces of a batch are made; the first is on a machine that then goes."""
        self.buffer.join(0)
        first = finish(self.buffer, begin(self.buffer))
        first.future = Gone()
        finish(self.buffer, begin(self.buffer))

    def on_lost_samples(self, experience: Experience, error: WorkerDiedError) -> None:
        self.lost.append(experience)

    def wait_for_end(self, seconds: float) -> None:
        """It has no thread."""


def as_they_are(draw: Draw) -> Samples:
    return draw(0), {}


def make_source(buffer: ExperienceBuffer, on_lost: Any, maker: Any) -> DetachedSource:
    source = DetachedSource(buffer, [maker], Rounds(1, 1, seed=0), as_they_are, on_lost)
    source.ask_for(step=1, num_steps=None)
    return source


def test_a_lost_piece_is_made_again_and_the_others_of_its_batch_stay() -> None:
    buffer = make_buffer()
    maker = MakesAgain(buffer)
    take_back = buffer.take_back

    def take_back_and_make(taken: list[Experience], gone: list[Experience]) -> None:
        take_back(taken, gone)
        order = begin(buffer, maker=1)
        assert order.piece == gone[0].piece
        finish(buffer, order, maker=1)

    buffer.take_back = take_back_and_make
    batch, metrics = make_source(buffer, maker.on_lost_samples, maker).take()
    assert metrics["detached/drawn_tokens"] == 4
    assert batch.non_tensor_batch["uid"].tolist() == ["0", "1", "2", "3"]
    assert [one.uids for one in maker.lost] == [["0", "1"]]

    buffer.trained({uid: [(0, 1)] for uid in "0123"})
    buffer.ledger.check()
    assert buffer.ledger.makers[0].dropped == {LOST: 2}
    assert buffer.ledger.makers[1].trained == 2


def losses(policy: str) -> MakerLosses:
    made = MakerLosses.__new__(MakerLosses)
    made._policy = policy
    return made


def test_a_run_that_shall_fail_says_whose_samples_are_lost() -> None:
    buffer = make_buffer()
    source = make_source(buffer, losses("fail").of_samples, MakesAgain(buffer))
    with pytest.raises(RolloutError, match="2 samples of maker 0 are lost: .*machine.*restart or"):
        source.take()


@pytest.mark.parametrize("policy", ["restart", "continue"])
def test_a_checkpoint_holds_what_is_there_and_has_the_rest_made_again(
    policy: str, tmp_path: Path
) -> None:
    buffer = make_buffer()
    maker = MakesAgain(buffer)
    maker.start()
    source = make_source(buffer, losses(policy).of_samples, maker)
    state = source.state_dict()
    source.write_samples(tmp_path / "queued")
    assert [path.name for path in (tmp_path / "queued").iterdir()] == ["1.safetensors"]

    resumed = make_buffer()
    make_source(resumed, losses(policy).of_samples, maker).load_state_dict(
        state, tmp_path / "queued"
    )
    assert [one.piece.number for one in resumed.ready] == [1]
    again = begin(resumed, maker=1)
    assert again.piece.number == 0
    finish(resumed, again, maker=1)
    train(resumed, resumed.take(4), version=2)
    resumed.ledger.check()
