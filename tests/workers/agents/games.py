"""Environments and tools of the tests, as a user writes them."""

# mypy: ignore-errors

from __future__ import annotations

import random
import time

from workers.agents import End, Environment, Turn


class Count(Environment):
    """Answers every turn with its number, and ends after `turns` of them."""

    def __init__(self, turns: int = 3, sleep: float = 0.0, slow_row: int = -1) -> None:
        self.turns, self.sleep, self.slow_row = turns, sleep, slow_row

    def reset(self, row, rng):
        self.said = []
        self.is_slow = row.get("number") == self.slow_row or self.slow_row < 0
        return "go"

    def step(self, text):
        self.said.append(text)
        if self.is_slow and self.sleep:
            time.sleep(self.sleep)
        if len(self.said) == self.turns:
            return End(float(len(self.said)))
        return Turn(f"{len(self.said)}", reward=0.5)


class Jitter(Count):
    """Sleeps for a time of its own, which nobody chose."""

    def step(self, text):
        time.sleep(random.SystemRandom().random() * 0.05)
        return super().step(text)


class Dice(Environment):
    """Draws from every source of chance that there is."""

    def reset(self, row, rng):
        self.shared = int(rng.integers(1000))
        return f"{self.shared} {random.randrange(1000)}"

    def step(self, text):
        return End(float(self.rng.integers(1000) + random.randrange(1000) / 1000))


class Sometimes(Count):
    """Raises in the second turn until it has been begun so often (by a file that counts)."""

    def __init__(self, file: str, fails: int) -> None:
        super().__init__()
        self.file, self.fails = file, fails

    def reset(self, row, rng):
        with open(self.file, "a") as file:
            file.write("x")
        return super().reset(row, rng)

    def step(self, text):
        if self.said and len(open(self.file).read()) <= self.fails:
            raise RuntimeError("out of order")
        return super().step(text)


class Hangs(Environment):
    def reset(self, row, rng):
        if row.get("number") == 0:
            time.sleep(60)
        return "go"

    def step(self, text):
        return End(1.0)


class Dies(Environment):
    def step(self, text):
        import os

        os._exit(3)


class Says(Environment):
    """Observes what it is told to."""

    def __init__(self, text: str) -> None:
        self.text = text

    def step(self, text):
        return Turn(self.text)


class Long(Environment):
    """Begins with more than a prompt holds."""

    def reset(self, row, rng):
        return "x" * 99


class Strange(Environment):
    def __init__(self, answer) -> None:
        self.answer = answer

    def reset(self, row, rng):
        return 7 if self.answer == "reset" else None

    def step(self, text):
        return {"number": 3, "nan": End(float("nan")), "text": Turn(5)}[self.answer]


class Counter:
    """As in TRL: no base class, `reset` takes columns, methods are tools, `reward` is read."""

    async def reset(self, number, **others):
        self.value, self.reward = number, 0.0
        return f"start at {number}"

    def increment(self, step: int) -> int:
        """Add to the counter.

        Args:
            step: what is added
        """
        self.value += step
        self.reward = float(self.value)
        return self.value

    def _hidden(self) -> None: ...


class NoReset:
    reset = None


class NarrowStep(Environment):
    def step(self):
        return End()


def add(a: int, b: int = 1) -> int:
    "The sum of two numbers."
    return a + b


async def shout(text: str) -> str:
    "The text in capitals."
    return text.upper()


def divide(a: float, b: float) -> float:
    "The quotient."
    return a / b


def untyped(a):
    "No type."


def silent(a: int) -> int:
    return a


def odd(a: set) -> int:
    "A set."
    return 0


class Silent(Environment):
    """One turn, and no word."""

    def reset(self, row, rng):
        return None

    def step(self, text):
        return End(0.0)


class Flaky(Count):
    """Raises for about half of the samples, by their own chance."""

    def step(self, text):
        if self.rng.random() < 0.3:
            raise RuntimeError("out of order")
        return super().step(text)


class Clock(Environment):
    """Says the time."""

    def step(self, text):
        return Turn(str(time.perf_counter()))


class Own(Environment):
    """Begins every sample in a way of its own."""

    def reset(self, row, rng):
        return str(self.rng.integers(10**9))

    def step(self, text):
        return End()


class Remembers(Environment):
    """Keeps what was played in its class."""

    games = 0

    def reset(self, row, rng):
        Remembers.games += 1
        return str(Remembers.games)

    def step(self, text):
        return End()


class NeverBegins(Environment):
    def reset(self, row, rng):
        raise RuntimeError("no game today")
