"""Responses that one call of the rollout left unfinished, until a later one ends them.

With `rollout.max_new_tokens_per_call` a call draws so many tokens of every response. What is
finished then waits for the rest of its piece; the rest goes into the maker's next call, beside the
prompts of the next piece. So a long response holds up its own piece alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from trainer.detached.pieces import Order
from trainer.rollouts.samples import concat_rows
from trainer.rollouts.trainer import with_responses
from verl_like.batch.protocol import DataProto
from workers.columns import read_columns
from workers.rollout.partial import join_prompts, unfinished_rows

Key = tuple[str, int]
"""Uid and sample index: a row."""


@dataclass
class _OpenPiece:
    order: Order
    keys: list[Key]
    """Of its rows, in their order."""
    finished: list[DataProto] = field(default_factory=list)

    @property
    def is_whole(self) -> bool:
        return sum(map(len, self.finished)) == len(self.keys)


class CarriedOver:
    """The open pieces of one maker."""

    def __init__(self) -> None:
        """Nothing is open."""
        self._open: dict[int, _OpenPiece] = {}
        self._rest: DataProto | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every response is finished."""
        return self._rest is None

    def clear(self) -> None:
        """Forget all of it: the maker is gone."""
        self._open, self._rest = {}, None

    def rows(self, order: Order | None, prompts: DataProto | None) -> DataProto:
        """What the next call answers: responses that go on, then the rows of a new piece."""
        rest, self._rest = self._rest, None
        if order is None or prompts is None:
            assert rest is not None, "somebody asked for a call that has nothing to answer"
            return rest
        self._open[order.piece.number] = _OpenPiece(order, _keys(prompts))
        return prompts if rest is None else join_prompts(rest, prompts)

    def sort(self, rows: DataProto, samples: DataProto) -> list[tuple[Order, DataProto]]:
        """The pieces that this call has made whole, with their samples; the rest goes on."""
        batch = with_responses(rows, samples)
        is_open = batch.non_tensor_batch["finish_reason"] == "abort"
        if is_open.any():
            self._rest = unfinished_rows(batch)
        done = batch.select_idxs(np.flatnonzero(~is_open))

        keys = np.array([uid for uid, _ in _keys(done)], dtype=object)
        whole = []
        for number, piece in list(self._open.items()):
            of_piece = np.isin(keys, list({uid for uid, _ in piece.keys}))
            if of_piece.any():
                piece.finished.append(done.select_idxs(np.flatnonzero(of_piece)))
            if piece.is_whole:
                whole.append((piece.order, _in_order(concat_rows(piece.finished), piece.keys)))
                del self._open[number]
        return whole


def _keys(rows: DataProto) -> list[Key]:
    indices = read_columns(rows, "sample_index")["sample_index"].tolist()
    return [(str(uid), i) for uid, i in zip(rows.non_tensor_batch["uid"], indices, strict=True)]


def _in_order(rows: DataProto, keys: list[Key]) -> DataProto:
    place_of = {key: place for place, key in enumerate(_keys(rows))}
    return rows.select_idxs([place_of[key] for key in keys])
