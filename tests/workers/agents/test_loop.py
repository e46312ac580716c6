"""Trajectories of several turns in one engine: ids, masks, rewards, failures, independence."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout_engines import load
from verl_like.errors import ConfigError
from verl_like.process.sandbox import Sandbox
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.host import RECORDED, EnvironmentHost, Kind, RecordedHost, name_of
from workers.agents.loop import TurnLoop
from workers.agents.trajectory import Trajectory, TrajectoryStart
from workers.config import EnvironmentConfig
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.native.engine import NativeEngine
from workers.rollout.sampling import noise_key

HERE = "tests.workers.agents.games"
WIDTH = 60
Play = Callable[..., list[Trajectory]]


LIMITS = EngineLimits(prompt_width=16, response_width=WIDTH, kv_cache_gb=0.5)


def fresh_engine(model: Any, limits: EngineLimits = LIMITS) -> NativeEngine:
    import copy

    engine = NativeEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    return engine


def starts(first: int, last: int, **row: Any) -> list[TrajectoryStart]:
    """Return the starts of samples of one prompt, each with its number in its row."""
    played = []
    for number in range(first, last):
        key = noise_key(0, "uid", number)
        seeds = noise_key(0, "uid", -1), key
        played.append(
            TrajectoryStart("a", {"number": number, **row}, seeds, key, f"sample {number}")
        )
    return played


@pytest.fixture
def play(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> Play:
    """Play trajectories of an environment of `games`."""

    def played(
        name: str,
        num: int = 4,
        kwargs: dict[str, Any] | None = None,
        num_open: int = 64,
        slots: int = 256,
        path: str = "",
        memory_gb: float = 8.0,
        **settings: Any,
    ) -> list[Trajectory]:
        config = EnvironmentConfig(
            **{"max_tokens_per_turn": 6, "step_timeout_s": 5.0, "retries": 0, **settings}
        )
        row = {} if path else {"game": name, "settings": kwargs or {}}
        arguments = kwargs or {} if path else {}
        sandbox = Sandbox(memory_gb=memory_gb)
        spec = EnvironmentSpec(path or f"{HERE}:OfRow", arguments, sandbox=sandbox)
        host = host_of(spec, config.step_timeout_s)
        stops = (tokenizer.eos_token_id,)
        chat = TurnRenderer(tokenizer, [], stops)
        engine = fresh_engine(model, replace(LIMITS, max_num_seqs=slots))
        loop = TurnLoop(engine, host, chat, config)
        sampling = SamplingParams(max_tokens=WIDTH, stop_token_ids=stops)
        return loop.play(starts(0, num, **row), sampling, num_open)

    return played


def drawn_of(one: Trajectory) -> torch.Tensor:
    return one.sample.versions >= 0


def test_a_row_has_drawn_and_observed_tokens_with_rewards_and_log_probs(
    play: Play, tokenizer: Any, model: Any
) -> None:
    """A turn's reward is at its last drawn token; log-probs are those of one pass over the row."""
    for one in play("Count"):
        assert (one.ended, one.sample.finish_reason) == ("terminated", "stop")
        assert one.num_turns == 3
        assert len(one.turns) == len(one.sample.tokens)
        assert one.turns == sorted(one.turns)
        assert one.sample.log_probs[~drawn_of(one)].isnan().all()
        observed = tokenizer.decode(one.sample.tokens[~drawn_of(one)])
        assert observed == "<user>1<assistant><user>2<assistant>"
        assert tokenizer.decode(one.sample.prompt) == "<bos><user>a\ngo<assistant>"
        assert [reward for _, reward in one.rewards] == [0.5, 0.5, 3.0]
        for turn, (place, _) in enumerate(one.rewards):
            assert drawn_of(one)[place]
            assert one.turns[place] == turn
            rest = drawn_of(one)[place + 1 :] & (torch.tensor(one.turns[place + 1 :]) == turn)
            assert not rest.any()
        ids = torch.tensor([[*one.sample.prompt, *one.sample.tokens.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(one.sample.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, one.sample.tokens[:, None])[:, 0]
        drawn = drawn_of(one)
        torch.testing.assert_close(one.sample.log_probs[drawn], expected[drawn], atol=1e-5, rtol=0)


def same_bits(left: list[Trajectory], right: list[Trajectory]) -> None:
    for one, other in zip(left, right, strict=True):
        assert one.sample.tokens.tolist() == other.sample.tokens.tolist()
        assert torch.equal(one.sample.log_probs.nan_to_num(7), other.sample.log_probs.nan_to_num(7))
        assert one.rewards == other.rewards
        assert one.turns == other.turns


def test_bits_do_not_depend_on_who_waits_for_whom(play: Play) -> None:
    expected = play("Count", num=6)
    for num_open, slots in [(6, 4), (3, 1)]:
        same_bits(play("Jitter", num=6, num_open=num_open, slots=slots), expected)


def test_a_slow_environment_holds_nobody_up(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end before it has answered once, and the loop keeps checking."""
    looks: list[float] = []
    answers = EnvironmentHost.answers

    def noted(self: EnvironmentHost, seconds: float) -> Any:
        looks.append(time.monotonic())
        return answers(self, seconds)

    monkeypatch.setattr(EnvironmentHost, "answers", noted)
    slow, *others = play("Count", num=4, kwargs={"turns": 2, "sleep": 2.0, "slow_row": 0})
    assert slow.environment_s > 4.0
    assert max(one.since for one in others) < slow.since - 2.0
    assert sum(slow.since - 2.0 < look < slow.since for look in looks) > 10


def test_chance_is_a_trajectorys_own_and_the_prompts(play: Play) -> None:
    together, again = play("Dice", num=3), play("Dice", num=3, num_open=1)
    assert [one.rewards for one in together] == [one.rewards for one in again]
    assert len({one.rewards[0][1] for one in together}) == 3
    assert len({tuple(one.sample.prompt) for one in together}) == 1


@pytest.mark.parametrize(
    ("name", "settings", "ended", "num_turns"),
    [
        ("Count", {"kwargs": {"turns": 99}, "max_turns": 2}, "max_turns", 2),
        ("Truncates", {}, "max_turns", 1),
        (
            "Count",
            {"max_tokens_per_turn": None, "kwargs": {"turns": 99}, "max_turns": 99},
            "length",
            None,
        ),
    ],
)
def test_a_trajectory_that_is_cut_says_so(
    play: Play, name: str, settings: dict[str, Any], ended: str, num_turns: int | None
) -> None:
    for one in play(name, num=2, **settings):
        assert (one.ended, one.sample.finish_reason) == (ended, "length")
        assert not one.problem
        assert num_turns in (None, one.num_turns)
        assert drawn_of(one)[-1]
        assert len(one.sample.tokens) <= WIDTH
        assert name == "Count" or one.rewards[-1][1] == 0.25


def test_a_failed_environment_is_played_again_with_the_same_noise(
    play: Play, tmp_path: Path
) -> None:
    (expected,) = play("Count", num=1)
    kwargs: dict[str, Any] = {"file": str(tmp_path / "count"), "fails": 2}
    (played,) = play("Sometimes", num=1, kwargs=kwargs, retries=2)
    assert played.attempts == 3
    same_bits([played], [expected])

    kwargs["file"] += "2"
    (given_up,) = play("Sometimes", num=1, kwargs=kwargs, retries=1)
    assert (given_up.ended, given_up.attempts) == ("environment", 2)
    assert "RuntimeError: out of order" in given_up.problem
    assert re.search(r"\n    at .*games\.py, line \d+$", given_up.problem)


def test_one_that_was_late_is_begun_anew_while_others_play(play: Play, tmp_path: Path) -> None:
    kwargs = {"file": str(tmp_path / "count")}
    played = play("HangsOnce", num=2, kwargs=kwargs, retries=2)
    assert [one.attempts for one in played] == [2, 1]
    same_bits(played, play("Count", num=2))


def test_one_that_takes_too_long_ends_wherever_it_is(play: Play) -> None:
    """Even if no single answer of its environment is late."""
    kwargs = {"turns": 2, "sleep": 60.0, "slow_row": 0}
    late, *others = play(
        "Count", num=3, kwargs=kwargs, step_timeout_s=90.0, trajectory_timeout_s=4.0, retries=2
    )
    assert (late.ended, late.attempts) == ("deadline", 1)
    assert late.problem == "it took longer than environment.trajectory_timeout_s=4 s"
    assert 4.0 < late.since - late.began < 30.0
    assert {one.ended for one in others} == {"terminated"}


def test_one_whose_process_ends_fails_alone(play: Play) -> None:
    (one,) = play("Dies", num=1)
    assert (one.ended, one.problem) == ("environment", "its process has ended")


def test_what_is_no_answer_is_a_failure_by_name(play: Play) -> None:
    words = {
        "reset": "reset returned int 7, not a text or None",
        "number": "step returned int 3, not a Turn or a TrajectoryEnd",
        "pair": "step returned tuple ('hm', 1.0), not a Turn or a TrajectoryEnd",
        "nan": "the reward is nan, not a finite number",
        "inf": "the reward is -inf, not a finite number",
        "no": "the reward is None, not a finite number",
        "word": "the reward is '1.0', not a finite number",
        "turn-nan": "the reward is nan, not a finite number",
        "turn-no": "the reward is None, not a finite number",
        "text": "a Turn whose text is int 5",
    }
    results = play("Strange", num=len(words), kwargs={"answer": list(words)})
    for trajectory, expected in zip(results, words.values(), strict=True):
        assert expected in trajectory.problem


def test_an_observation_that_leaves_no_room_ends_the_trajectory(play: Play) -> None:
    (one,) = play("Says", num=1, kwargs={"text": "x" * WIDTH})
    assert (one.ended, one.num_turns) == ("length", 1)
    assert drawn_of(one).all()


def test_a_first_observation_that_does_not_fit_is_one_trajectorys_failure(play: Play) -> None:
    long, *others = play("Long", num=3)
    assert (long.ended, long.num_turns, long.is_left_out) == ("environment", 0, True)
    assert re.search(r"begins with \d+ tokens .* data\.max_prompt_length is 16", long.problem)
    assert {one.ended for one in others} == {"terminated"}


def test_halves_of_a_surrogate_pair_are_read_as_something_else(play: Play, tokenizer: Any) -> None:
    (one,) = play("Says", num=1, kwargs={"text": "a\ud800b"}, max_turns=2)
    assert one.ended == "max_turns"
    assert "a?b" in tokenizer.decode(one.sample.tokens[~drawn_of(one)])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Nowhere", "has no such name"),
        ("add", "is neither a class with a method `reset`"),
        ("NoReset", "is neither a class with a method `reset`"),
        ("NarrowStep", r"step is called with \(the policy's text\)"),
        ("ByPlace", "reset is called with keyword arguments, but 'row' is positional-only"),
    ],
)
def test_what_is_no_environment_is_refused_before_a_trajectory(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(f"{HERE}:{name}").load()


def test_arguments_that_the_class_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"environment.kwargs=\{'turn': 2\}: .*'turn'"):
        EnvironmentHost(EnvironmentSpec(f"{HERE}:Count", {"turn": 2}), 1.0)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "is not loaded: its process ended with exit code 3"),
        ("import os, time; os.kill(os.getppid(), 9); time.sleep(9)", "its supervisor are gone"),
        ("raise SystemExit(2)", r"^environment=\S+ends.py:Any is not loaded: SystemExit: 2$"),
    ],
)
def test_code_that_ends_its_process_is_refused(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "ends.py").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        EnvironmentHost(EnvironmentSpec(f"{tmp_path}/ends.py:Any"), 1.0)


def test_a_row_that_names_no_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match="column 'environment' is None, .* one of chess, go"):
        name_of({"chess": Kind([]), "go": Kind([])}, {})


def test_many_trajectories_take_the_handles_of_those_that_were_open_together(play: Play) -> None:
    before = len(os.listdir("/proc/self/fd"))
    play("Count", num=16, num_open=2, kwargs={"turns": 1})
    assert len(os.listdir("/proc/self/fd")) <= before + 2 + 6  # a socket each, and the host's own


HOGS = """
import os
import time
from pathlib import Path
from workers.agents import TrajectoryEnd

class Hog:
    def __init__(self, file):
        self.file = Path(file)

    def reset(self, row):
        if not self.file.exists():
            self.file.write_text(str(os.getppid()))
        return "go"

    def step(self, text):
        if self.file.read_text() == str(os.getppid()):  # in the first process of the code
            self.ballast = bytearray(b"x" * int(0.15 * 2**30))
            time.sleep(60)
        return TrajectoryEnd(1.0)

class Greedy(Hog):
    def step(self, text):
        bytearray(2**30)

class Prints(Hog):
    def step(self, text):
        print("a line")
        print("x" * 2**17)
        return TrajectoryEnd(1.0)
"""


def hogs(play: Play, tmp_path: Path, name: str, **settings: Any) -> list[Trajectory]:
    """Four trajectories of an environment above, whose processes share 0.4 GiB."""
    (tmp_path / "hogs.py").write_text(HOGS)
    kwargs = {"file": str(tmp_path / "first")}
    return play(
        "",
        path=f"{tmp_path}/hogs.py:{name}",
        kwargs=kwargs,
        memory_gb=0.4,
        step_timeout_s=50.0,
        **settings,
    )


def test_environments_that_take_too_much_memory_together_are_played_again(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their host is ended; the next host plays them, and those of later steps."""
    played = hogs(play, tmp_path, "Hog", retries=1)
    assert [(one.ended, one.attempts) for one in played] == [("terminated", 2)] * 4
    (said,) = [record.getMessage() for record in caplog.records if "GiB" in record.getMessage()]
    assert re.search(r"used .* GiB of memory \(memory_gb=0.4\): environment.sandbox", said)


def test_advice_names_the_sandbox_of_environments(play: Play, tmp_path: Path) -> None:
    for one in hogs(play, tmp_path, "Greedy"):
        assert "MemoryError:  (its limit is environment.sandbox.memory_gb)" in one.problem


def test_what_environments_print_has_a_prefix_and_an_end(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hogs.py").write_text(HOGS)
    spec = EnvironmentSpec(f"{tmp_path}/hogs.py:Prints", {"file": str(tmp_path / "n")})
    with closing(EnvironmentHost(spec, 20.0)) as host:
        host.open(0, (0, 1), {})
        while not list(host.answers(1.0)):
            pass
        host.say(0, "a")
        while not list(host.answers(1.0)):
            pass
    printed = capfd.readouterr().out.splitlines()
    assert printed[0] == "(environment) a line"
    assert all(line.startswith("(environment) ") for line in printed if line)
    assert 2**15 < sum(map(len, printed)) < 2**17
    assert "further output of this process is dropped" in printed[-1]


class Scripted:
    """A host whose environment ends its process while the engine samples."""

    def __init__(self) -> None:
        self.script: list[dict[str, Any]] = [{"text": None}]
        self.script += [{"failed": "its process has ended", "reason": "environment"}]
        self.script += [{"text": None}, {}, {"end": True, "reward": 1.0}]

    def open(self, *_: Any) -> None: ...

    def busy_s(self, number: int) -> float:
        return 0.0

    def say(self, *_: Any) -> None:
        self.script = self.script[-1:]

    def end(self, *_: Any) -> None: ...

    def answers(self, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        if seconds or not self.script[0]:  # nothing comes soon; it thinks until something is said
            return []
        return [(0, self.script.pop(0))]


def test_one_whose_process_ends_while_it_is_drawn_is_begun_anew(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agents.loop.TAKE_S", 0.0)  # a token between two looks at the host
    stops = (tokenizer.eos_token_id,)
    engine, chat = fresh_engine(model), TurnRenderer(tokenizer, [], stops)
    config = EnvironmentConfig(max_tokens_per_turn=6, retries=1)
    loop = TurnLoop(engine, Scripted(), chat, config)
    start = TrajectoryStart("a", {}, (0, 1), noise_key(0, "uid", 0), "sample 0")
    (one,) = loop.play([start], SamplingParams(max_tokens=WIDTH, stop_token_ids=stops), 1)
    assert (one.attempts, one.ended, one.num_turns) == (2, "terminated", 1)
    assert engine.num_running == 0


def test_a_text_like_a_call_in_another_form_is_noted_once(
    model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    stops = (tokenizer.eos_token_id,)
    engine, chat = fresh_engine(model), TurnRenderer(tokenizer, [], stops)
    answers = [{"text": None}, {"end": True, "reward": 1.0, "call_like": "<odd_tool_call"}]
    loop = TurnLoop(engine, RecordedHost({}), chat, EnvironmentConfig())
    starts = [
        TrajectoryStart(
            "a", {RECORDED: answers}, (0, 1), noise_key(0, "uid", number), f"sample {number}"
        )
        for number in range(3)
    ]
    loop.play(starts, SamplingParams(max_tokens=WIDTH, stop_token_ids=stops), 3)
    (notice,) = [record.message for record in caplog.records if "odd_tool" in record.message]
    assert "looks like a call" in notice
    assert "environment.call_parser" in notice


def test_what_processes_share_counts_once_against_their_memory(tmp_path: Path) -> None:
    """Eight processes share the 64 MiB of their code, within half a gigabyte."""
    (tmp_path / "heavy.py").write_text(
        "import time\nfrom workers.agents import TrajectoryEnd\nBALLAST = bytearray(b'x' * 2**26)\n"
        "class Heavy:\n    def reset(self, row):\n        return 'go'\n"
        "    def step(self, text):\n        time.sleep(1)\n        return TrajectoryEnd(1.0)\n"
    )
    spec = EnvironmentSpec(f"{tmp_path}/heavy.py:Heavy", sandbox=Sandbox(memory_gb=0.4))
    host = EnvironmentHost(spec, 20.0)
    try:
        for number in range(8):
            host.open(number, (0, number), {})
        played: dict[int, Any] = {}
        for _ in range(2):
            while len(played) < 8:
                played |= dict(host.answers(1.0))
            assert not [one for one in played.values() if "failed" in one]
            played = {}
            for number in range(8):
                host.say(number, "a")
    finally:
        host.close()
