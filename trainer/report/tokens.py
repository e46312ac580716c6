"""The tokens of a run: sampled = trained + left out (by reason), from the metrics of its steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

DRAWN, TRAINED = "training/num_drawn_tokens", "training/num_trained_tokens"
LEFT_OUT = "training/num_left_out_tokens/"
"""A prefix, which the reason follows."""


def tokens_of(lines: Iterable[Mapping[str, float]]) -> tuple[int, Counter[str]]:
    """Return the tokens of these steps that were trained on, and those left out, by reason."""
    trained, left_out = 0, Counter[str]()
    for line in lines:
        trained += int(line.get(TRAINED, 0))
        for name, num in line.items():
            if name.startswith(LEFT_OUT):
                left_out[name.removeprefix(LEFT_OUT)] += int(num)
    return trained, left_out


def drawn_of(lines: Iterable[Mapping[str, float]]) -> int:
    """Return the tokens that the rollout sampled in these steps, as counted there."""
    return sum(int(line.get(DRAWN, 0)) for line in lines)


def tokens_in_words(drawn: int, trained: int, left_out: Mapping[str, int], queued: int = 0) -> str:
    """Describe the tokens of a run in one line."""
    total = sum(left_out.values())
    reasons = "; ".join(f"{reason}: {num:,}" for reason, num in left_out.items())
    parts = [f"{trained:,} trained", *([f"{queued:,} queued"] if queued else [])]
    parts.append(f"{total:,} left out" + (f" ({reasons})" if reasons else ""))
    sign = "=" if drawn == trained + queued + total else "≠"
    return f"{drawn:,} drawn {sign} {' + '.join(parts)}"
