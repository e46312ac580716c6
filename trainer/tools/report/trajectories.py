"""Samples of several turns for the report: their turns, and their outcomes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.rewards.outcome import is_success

TRAJECTORIES_PER_STEP, MAX_TURNS, LONGEST_TURN = 6, 24, 600
"""The most trajectories per step, turns per trajectory, and characters per turn."""
SUCCESS, PARTIAL, NO_SUCCESS = "success", "partial reward", "no success"
FAILED = "environment failed"
MAX_ROWS = 12
SECONDS = ("engine", "environment", "waiting")


@dataclass(frozen=True)
class ShownTurn:
    """A response or an observation."""

    role: str
    text: str
    is_sampled: bool
    reward: float | None = None
    seconds: tuple[float, ...] = ()
    """Seconds in the engine, in the environment, waiting."""
    stats: str = ""
    """The turn's tokens and tool calls."""


@dataclass(frozen=True)
class ShownTrajectory:
    """A sample of several turns."""

    turns: Sequence[ShownTurn]
    ended: str
    problem: str
    stats: str
    """Turns, tokens and seconds in total."""
    longest: float
    """Seconds of the longest turn."""


def trajectory_of(row: Mapping[str, Any]) -> ShownTrajectory:
    """Return the turns in a sample's line; a sample may have none."""
    rows = _turns(row)
    sampled = [turn for turn in rows if _is_sampled(turn)]
    turns = [_shown(turn) for turn in rows[:MAX_TURNS]]
    if len(rows) > MAX_TURNS:
        turns.append(ShownTurn("", f"… {len(rows) - MAX_TURNS} more", is_sampled=False))
    seconds = [sum(_seconds(turn)) for turn in sampled]
    drawn, observed = (sum(_number(t, n) for t in sampled) for n in ("tokens", "observed_tokens"))
    counts = f"{_counted(len(sampled), 'turn')}, {_counted(drawn, 'token')} sampled"
    return ShownTrajectory(
        turns,
        ended=str(row.get("ended") or ""),
        problem=shorten(row.get("problem") or "", LONGEST_TURN),
        stats=f"{counts}, {observed:.0f} observed, {sum(seconds):.3g} s",
        longest=max(seconds, default=0.0),
    )


def _turns(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    turns = row.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def _is_sampled(turn: Mapping[str, Any]) -> bool:
    """Return whether the policy sampled this turn; resent history does not count."""
    return turn.get("role") == "assistant" and "tokens" in turn


def _shown(turn: Mapping[str, Any]) -> ShownTurn:
    text = shorten(turn.get("text", ""), LONGEST_TURN)
    if not _is_sampled(turn):
        return ShownTurn(str(turn.get("role", "")), text, is_sampled=False)
    stats = _counted(_number(turn, "tokens"), "token")
    if "calls" in turn:
        failed = f"{_number(turn, 'errors'):.0f} failed"
        stats = f"{stats}, {_counted(_number(turn, 'calls'), 'call')}, {failed}"
    reward = turn["reward"] if isinstance(turn.get("reward"), int | float) else None
    return ShownTurn("policy", text, True, reward, _seconds(turn), stats)


def _seconds(turn: Mapping[str, Any]) -> tuple[float, ...]:
    return tuple(_number(turn, f"{name}_s") for name in SECONDS)


def _counted(number: float, noun: str) -> str:
    return f"{number:.0f} {noun}{'' if number == 1 else 's'}"


def _number(turn: Mapping[str, Any], name: str) -> float:
    value = turn.get(name)
    return float(value) if isinstance(value, int | float) else 0.0


def outcomes_by_turns(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return number of turns -> outcome -> number of trajectories.

    A success scores 1 or more, a partial reward is above 0. The longest trajectories share a row if
    there are too many rows.
    """
    counts: dict[int, Counter[str]] = {}
    for row in rows:
        num_sampled = sum(map(_is_sampled, _turns(row)))
        if num_sampled:
            outcome = FAILED if row.get("problem") else _outcome(_number(row, "score"))
            counts.setdefault(num_sampled, Counter())[outcome] += 1
    numbers = sorted(counts)
    result = {str(number): dict(counts[number]) for number in numbers[:MAX_ROWS]}
    rest = numbers[MAX_ROWS:]
    if rest:
        result[f"{rest[0]} or more"] = dict(sum((counts[number] for number in rest), Counter()))
    return result


def _outcome(score: float) -> str:
    if is_success(score):
        return SUCCESS
    return PARTIAL if score > 0 else NO_SUCCESS


def shorten(text: Any, longest: int) -> str:
    """Return the text, or its beginning and the number of further characters."""
    text = str(text)
    num_cut = len(text) - longest
    return text if num_cut <= 0 else f"{text[:longest]} … ({num_cut} more characters)"
