"""The ends of pairs: as in the samples that the reward model will score.

A PPO sample ends with its first stop token. A chat template may write a line break after it, or no
stop token at all. A score is read at the last token, so both would teach the model something else.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from trainer.data.encoded_rows import stop_tokens, without_blanks
from trainer.data.pairs import PairRow

logger = logging.getLogger(__name__)


def end_as_samples_do(
    key: str, rows: Sequence[PairRow], tokenizer: Any, path: str, max_length: int
) -> list[PairRow]:
    """Return the pairs without blanks after a side's stop token; warn about sides without one.

    `key` names the files, `path` the model; a side of `max_length` tokens may have been cut.
    """
    stops = stop_tokens(tokenizer, path)
    pairs, num_open = [], 0
    for row in rows:
        chosen = without_blanks(row.chosen, stops, tokenizer)
        rejected = without_blanks(row.rejected, stops, tokenizer)
        pairs.append(replace(row, chosen=chosen, rejected=rejected))
        for side in (chosen, rejected):
            num_open += len(side.ids) < max_length and int(side.ids[-1]) not in stops

    if num_open:
        logger.warning(
            "%s: %d of %d sides do not end with a stop token of the model (%s), and PPO's samples "
            "do: their scores would be read at a token that no score was trained for. Have the "
            "chat template write it after the assistant's turns, or give prompt, chosen and "
            "rejected as texts, which get it.",
            key,
            num_open,
            2 * len(rows),
            ", ".join(tokenizer.convert_ids_to_tokens(sorted(set(stops)))),
        )
    return pairs
