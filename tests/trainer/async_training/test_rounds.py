"""A round: fresh batches in order, then the same batches again in other orders."""

from __future__ import annotations

from trainer.async_training.chunks import Rounds


def test_every_batch_of_a_round_is_trained_on_as_often_as_there_are_epochs() -> None:
    rounds = Rounds(update_steps=4, train_epochs=3, seed=7)
    seen: dict[int, list[int]] = {}
    for step in range(1, 13):
        number, epoch, place = rounds.place(step)
        assert number == 0
        seen.setdefault(epoch, []).append(rounds.order(number, epoch)[place])
    assert seen[0] == [0, 1, 2, 3]
    assert sorted(seen[1]) == sorted(seen[2]) == [0, 1, 2, 3]
    assert seen == {e: [Rounds(4, 3, 7).order(0, e)[p] for p in range(4)] for e in range(3)}


def test_orders_differ_between_epochs_and_rounds() -> None:
    rounds = Rounds(update_steps=8, train_epochs=3, seed=7)
    assert len({tuple(rounds.order(number, epoch)) for number in (0, 1) for epoch in (1, 2)}) == 4
