"""Environments and tools of the tests, as a user writes them."""

# mypy: ignore-errors

from __future__ import annotations

import os
import random
import time

from workers.agents import Environment, Observation, TrajectoryEnd


class OfRow(Environment):
    """The environment that the row names, so that tests share a process with the loaded code."""

    def reset(self, row, rng):
        self.inner = globals()[row["class"]](**row["settings"])
        self.inner.rng_seed = self.rng_seed
        return self.inner.reset(row, rng)

    def step(self, text):
        return self.inner.step(text)


class OfRowForTwo(OfRow):
    players = ("white", "black")

    def step(self, text, player):
        return self.inner.step(text, player)


class Count(Environment):
    """Replies to every turn with its number, and ends after `turns` turns."""

    def __init__(self, turns: int = 3, sleep: float = 0.0, slow_row: int = -1) -> None:
        self.turns, self.sleep, self.slow_row = turns, sleep, slow_row

    def reset(self, row, rng):
        self.texts = []
        self.is_slow = row.get("number") == self.slow_row or self.slow_row < 0
        return "go"

    def step(self, text):
        self.texts.append(text)
        if self.is_slow and self.sleep:
            time.sleep(self.sleep)
        if len(self.texts) == self.turns:
            return TrajectoryEnd(float(len(self.texts)))
        return Observation(f"{len(self.texts)}", reward=0.5)


class Jitter(Count):
    """Sleeps before each reply, by the schedule with this number."""

    def __init__(self, schedule: int = 0) -> None:
        super().__init__()
        self.schedule = schedule

    def reset(self, row, rng):
        self.delays = random.Random(1000 * self.schedule + row.get("number", 0))
        time.sleep(self.delays.random() * 0.05)
        return super().reset(row, rng)

    def step(self, text):
        time.sleep(self.delays.random() * 0.05)
        return super().step(text)


class Dice(Environment):
    """Draws from every source of randomness."""

    def reset(self, row, rng):
        self.shared = int(rng.integers(1000))
        return f"{self.shared} {random.randrange(1000)}"

    def step(self, text):
        return TrajectoryEnd(float(self.rng.integers(1000) + random.randrange(1000) / 1000))


class Sometimes(Count):
    """Raises in the second turn until it has started this often, counted in a file."""

    def __init__(self, file: str, fails: int) -> None:
        super().__init__()
        self.file, self.fails = file, fails

    def reset(self, row, rng):
        with open(self.file, "a") as file:
            file.write("x")
        return super().reset(row, rng)

    def step(self, text):
        if self.texts and len(open(self.file).read()) <= self.fails:
            raise RuntimeError("out of order")
        return super().step(text)


class Faulty(Count):
    """In the first attempt of a row's sample, some steps end its process, and others are late."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def reset(self, row, rng):
        self.draws = random.Random(repr(self.rng.bit_generator.state))
        place = os.path.join(self.folder, str(self.draws.getrandbits(64)))
        self.is_first = not os.path.exists(place)
        open(place, "a").close()
        return super().reset(row, rng)

    def step(self, text):
        draw = self.draws.random() if self.is_first else 1.0
        if draw < 0.3:
            with open(os.path.join(self.folder, "killed"), "a") as file:
                file.write("x")
            os._exit(1)
        time.sleep(0.05 * (draw < 0.6))
        return super().step(text)


class HangsOnce(Count):
    """The first attempt of row 0 hangs; the other rows take their time."""

    def __init__(self, file: str) -> None:
        super().__init__()
        self.file = file

    def reset(self, row, rng):
        self.is_first = row["number"] == 0
        with open(self.file, "a") as file:
            file.write("x" * self.is_first)
        if self.is_first and len(open(self.file).read()) == 1:
            time.sleep(60)
        return super().reset(row, rng)

    def step(self, text):
        time.sleep(0.0 if self.is_first else 2.0)
        return super().step(text)


class Hangs(Environment):
    def reset(self, row, rng):
        if row.get("number") == 0:
            time.sleep(60)
        return "go"

    def step(self, text):
        return TrajectoryEnd(1.0)


class HangsWhenTold(Environment):
    """Every trajectory has the reward 0; some words make it hang."""

    def step(self, text):
        if text[:1] < "m":
            time.sleep(60)
        return TrajectoryEnd(0.0)


class Dies(Environment):
    def step(self, text):
        os._exit(3)


class Says(Environment):
    """Replies with the configured text and images."""

    def __init__(self, text: str, images=()) -> None:
        self.text, self.images = text, images

    def step(self, text):
        return Observation(self.text, images=self.images)


class Long(Environment):
    """Starts row 0 with more tokens than a prompt may have."""

    def reset(self, row, rng):
        return "x" * (99 if row["number"] == 0 else 1)

    def step(self, text):
        return TrajectoryEnd(1.0)


class Strange(Environment):
    def __init__(self, answer) -> None:
        self.answer = answer  # an answer, or a list with one per row

    def reset(self, row, rng):
        if isinstance(self.answer, list):
            self.answer = self.answer[row["number"]]
        return 7 if self.answer == "reset" else None

    def step(self, text):
        answers = {"number": 3, "pair": ("hm", 1.0)}
        rewards = {"nan": float("nan"), "inf": -float("inf"), "no": None, "word": "1.0"}
        if self.answer in rewards:
            return TrajectoryEnd(rewards[self.answer])
        if "turn" in self.answer:
            return Observation("hm", rewards[self.answer[5:]])
        return Observation(5) if self.answer == "text" else answers[self.answer]


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


class Judged:
    """An environment of TRL's form, with the reward as a method."""

    def __init__(self) -> None:
        self.text = ""

    def reset(self, level=1, **others) -> None:
        self.level = level

    def write(self, text: str) -> None:
        """Write it down.

        Args:
            text: what is written
        """
        self.text += text

    async def get_reward(self) -> float:
        return float(self.level * len(self.text))


class Rolls:
    """An environment of TRL's form: a random generator, a private helper, and `step` as a tool."""

    def __init__(self) -> None:
        self.rng, self.reward = random.Random(3), 0.0

    def reset(self, **columns) -> str:
        return f"begin at {self.rng.randint(1, 6)}"

    def step(self, by: int) -> str:
        """Go on.

        Args:
            by: how far
        """
        self.reward = float(self.double(by))
        return f"went {by}"

    @staticmethod
    def double(number):
        return 2 * number


class MisspeltStep:
    def reset(self):
        return "begin"

    def stpe(self, text):
        return "end"


class NoReset:
    reset = None


class NeedsLevel(Environment):
    def reset(self, level, row):
        return str(level)

    def step(self, text):
        return TrajectoryEnd(truncated=text == "stop")


class ByPlace(Environment):
    def reset(self, row, /):
        return "go"


class NarrowStep(Environment):
    def step(self):
        return TrajectoryEnd()


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
    """One turn without an observation."""

    def reset(self, row, rng):
        return None

    def step(self, text):
        return TrajectoryEnd(0.0)


class Clock(Environment):
    """Observes the time."""

    def step(self, text):
        return Observation(str(time.perf_counter()))


class Own(Environment):
    """Begins every sample differently."""

    def reset(self, row, rng):
        return str(self.rng.integers(10**9))

    def step(self, text):
        return TrajectoryEnd()


class Truncates(Environment):
    """Plays one turn of an unfinished trajectory."""

    def step(self, text):
        return TrajectoryEnd(0.25, truncated=True)


class ByLot(Environment):
    """Observes all that it reads, something else in every trajectory."""

    def reset(self, row, rng):
        return str(rng.integers(10**6))

    def step(self, text):
        return TrajectoryEnd(1.0)


class Duel(Environment):
    """Two players in turn: the longer text of a round wins, and earns a tenth of its length."""

    players = ("white", "black")

    def __init__(self, rounds: int = 2, both: bool = False, leaves: bool = False) -> None:
        self.rounds, self.both, self.leaves = rounds, both, leaves

    def reset(self, row, rng):
        self.texts = {name: [] for name in self.players}
        return {name: f"{name} {rng.integers(9)}" for name in self.players[: 1 + self.both]}

    def step(self, text, player):
        self.texts[player].append(text)
        white, black = (self.texts[name] for name in self.players)
        if self.both and len(white) != len(black):
            return {}
        if self.leaves:
            reply = Observation("alone") if len(black) < 2 else TrajectoryEnd(1.0)
            return {"black": reply} | ({"white": TrajectoryEnd(0.25)} if player == "white" else {})
        if len(black) < len(white) and not self.both:
            return {"black": Observation("your move", 0.5 * (len(white) > 1))}
        if len(black) == self.rounds:
            longest = [max(map(len, texts)) for texts in (white, black)]
            return {"white": TrajectoryEnd(longest[0]), "black": TrajectoryEnd(-longest[1])}
        if self.both:
            return {name: Observation("go on", 0.5) for name in self.players}
        return {"white": Observation("go on", 0.5)}


class FailsOnce(Environment):
    """Two players; fails once after the text of the first one, recorded in a file."""

    players = ("white", "black")

    def __init__(self, mark="failed"):
        self.name = mark

    def reset(self, row, rng):
        self.mark = f"{self.name}-{row['number']}"
        return {"white": "go"}

    def step(self, text, player):
        if player == "white" and not os.path.exists(self.mark):
            open(self.mark, "w").close()
            raise ValueError("failed once")
        return (
            {"black": Observation("go")}
            if player == "white"
            else {p: TrajectoryEnd(1.0) for p in self.players}
        )


class Stalls(Environment):
    """Two players; each row has another invalid reply to the first one."""

    players = ("white", "black")

    def reset(self, row, rng):
        self.number = row["number"]
        return {"white": "go"}

    def step(self, text, player):
        seen = Observation("a")
        replies = [{}, {"red": seen}, {"black": Observation("a", 1.0)}, seen, {"white": "a"}]
        return replies[self.number]


class Echo(Environment):
    """Repeats the policy's text."""

    def step(self, text: str) -> Observation:
        return Observation(text)


class Shows(Environment):
    """Shows the images of the turn in each observation, with as many places as images."""

    def __init__(self, turns) -> None:
        self.turns = list(turns)

    def reset(self, row, rng):
        return Observation("look", images=self.turns.pop(0))

    def step(self, text):
        if not self.turns:
            return TrajectoryEnd(1.0)
        images = self.turns.pop(0)
        return Observation("then <image>" * len(images) + "?", images=images)


class ShowsTwo(Environment):
    """Shows white the first and the last image, and black the one between, before its turn."""

    def __init__(self, paths) -> None:
        self.paths = paths

    def reset(self, row, rng):
        self.turns = 0
        return {"white": Observation("you", images=self.paths[:1])}

    def step(self, text, player):
        self.turns += 1
        if player == "black":
            return {"white": Observation("and", images=self.paths[2:])}
        if self.turns == 1:
            return {"black": Observation("now you", images=self.paths[1:2])}
        return {"white": TrajectoryEnd(1.0), "black": TrajectoryEnd(0.0)}
