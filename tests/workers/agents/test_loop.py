"""Trajectories of several turns in one engine: ids, masks, rewards, failures, independence.

`new_loop`, `sampling_of`, `starts`, `sampled_mask` and `assert_same_bits` also serve other tests.
"""

from __future__ import annotations

import os
import re
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
from workers.agents.host import EnvironmentHost, Kind, name_of
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.players import TurnLoop, trajectory_columns
from workers.agents.trajectory import Trajectory, TrajectoryStart
from workers.config import EnvironmentConfig
from workers.rewards.environment import trajectory_metrics
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.native.engine import NativeRolloutEngine
from workers.rollout.sample import to_batch as make_batch
from workers.rollout.sampling import sample_seed

HERE = "tests.workers.agents.games"
WIDTH = 60
Play = Callable[..., list[Trajectory]]
LIMITS = EngineLimits(prompt_width=16, response_width=WIDTH, kv_cache_gib=0.5)


def fresh_engine(model: Any, limits: EngineLimits = LIMITS) -> NativeRolloutEngine:
    import copy

    engine = NativeRolloutEngine(copy.deepcopy(model), limits, owns_weights=True)
    load(engine, model, 3)
    return engine


def new_loop(
    model: Any,
    tokenizer: Any,
    host: EnvironmentHost,
    limits: EngineLimits = LIMITS,
    **settings: Any,
) -> TurnLoop:
    """Return a loop with a fresh engine; by default, turns are short and there are no retries."""
    config = EnvironmentConfig(**{"max_tokens_per_turn": 6, "retries": 0, **settings})
    chat = TurnRenderer(tokenizer, [], (tokenizer.eos_token_id,))
    return TurnLoop(fresh_engine(model, limits), host, chat, config)


def sampling_of(tokenizer: Any, max_tokens: int = WIDTH, **settings: Any) -> SamplingParams:
    stop_token_ids = (tokenizer.eos_token_id,)
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=stop_token_ids, **settings)


def starts(first: int, last: int, **row: Any) -> list[TrajectoryStart]:
    """Return the starts of samples of one prompt, each with its number in its row."""
    keys = {number: sample_seed(0, "uid", number) for number in range(first, last)}
    seed = sample_seed(0, "uid", -1)
    return [
        TrajectoryStart("a", {"number": number, **row}, (seed, key), key, f"sample {number}")
        for number, key in keys.items()
    ]


@pytest.fixture
def play(tokenizer: Any, model: Any, host_of: Callable[..., EnvironmentHost]) -> Play:
    """Return a function that plays trajectories of an environment of `games`."""

    def play_environment(
        name: str,
        num: int = 4,
        kwargs: dict[str, Any] | None = None,
        num_open: int = 64,
        slots: int = 256,
        path: str = "",
        memory_gib: float = 8.0,
        step_timeout_s: float = 5.0,
        **settings: Any,
    ) -> list[Trajectory]:
        row = {} if path else {"class": name, "settings": kwargs or {}}
        arguments = kwargs or {} if path else {}
        sandbox = Sandbox(memory_gib=memory_gib)
        spec = EnvironmentSpec(path or f"{HERE}:OfRow", arguments, sandbox=sandbox)
        limits = replace(LIMITS, max_num_seqs=slots)
        loop = new_loop(model, tokenizer, host_of(spec, step_timeout_s), limits, **settings)
        return loop.play(starts(0, num, **row), sampling_of(tokenizer), num_open)

    return play_environment


def sampled_mask(trajectory: Trajectory) -> torch.Tensor:
    """Return a mask of the tokens that the policy sampled; the others are observed."""
    return trajectory.sample.versions >= 0


def test_a_row_has_sampled_and_observed_tokens_rewards_and_log_probs(
    play: Play, tokenizer: Any, model: Any
) -> None:
    """A turn's reward is at its last sampled token; log-probs match one pass over the row."""
    for trajectory in play("Count"):
        sample, is_sampled = trajectory.sample, sampled_mask(trajectory)
        assert (trajectory.ended, sample.finish_reason) == ("terminated", "stop")
        assert trajectory.num_turns == 3
        assert len(trajectory.turns) == len(sample.tokens)
        assert trajectory.turns == sorted(trajectory.turns)
        assert sample.log_probs[~is_sampled].isnan().all()
        observed = tokenizer.decode(sample.tokens[~is_sampled])
        turns_end = "<eos>"  # the template ends a turn that was cut
        assert observed.replace(turns_end, "") == "<user>1<assistant><user>2<assistant>"
        assert tokenizer.decode(sample.prompt) == "<bos><user>a\ngo<assistant>"
        assert [reward for _, reward in trajectory.rewards] == [0.5, 0.5, 3.0]
        for turn, (place, _) in enumerate(trajectory.rewards):
            sampled_places = is_sampled & (torch.tensor(trajectory.turns) == turn)
            assert place == int(sampled_places.nonzero()[-1])
        ids = torch.tensor([[*sample.prompt, *sample.tokens.tolist()]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(sample.prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
        torch.testing.assert_close(
            sample.log_probs[is_sampled], expected[is_sampled], atol=1e-5, rtol=0
        )


def assert_same_bits(left: list[Trajectory], right: list[Trajectory]) -> None:
    for a, b in zip(left, right, strict=True):
        assert a.sample.tokens.tolist() == b.sample.tokens.tolist()
        assert torch.equal(a.sample.log_probs.nan_to_num(7), b.sample.log_probs.nan_to_num(7))
        assert a.rewards == b.rewards
        assert a.turns == b.turns


def test_bits_do_not_depend_on_the_order_of_replies(play: Play) -> None:
    expected = play("Count", num=6)
    for num_open, slots in [(6, 4), (3, 1)]:
        assert_same_bits(play("Jitter", num=6, num_open=num_open, slots=slots), expected)


def test_random_numbers_depend_only_on_the_prompt_and_the_sample(play: Play) -> None:
    together, one_by_one = play("Dice", num=3), play("Dice", num=3, num_open=1)
    rewards = [trajectory.rewards for trajectory in together]
    assert rewards == [trajectory.rewards for trajectory in one_by_one]
    assert len({last[1] for *_, last in rewards}) == 3
    assert len({tuple(trajectory.sample.prompt) for trajectory in together}) == 1


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
def test_a_truncated_trajectory_has_the_reason(
    play: Play, name: str, settings: dict[str, Any], ended: str, num_turns: int | None
) -> None:
    for trajectory in play(name, num=2, **settings):
        assert (trajectory.ended, trajectory.sample.finish_reason) == (ended, "length")
        assert not trajectory.problem
        assert num_turns in (None, trajectory.num_turns)
        assert sampled_mask(trajectory)[-1]
        assert len(trajectory.sample.tokens) <= WIDTH
        assert name == "Count" or trajectory.rewards[-1][1] == 0.25


def test_a_failed_environment_is_retried_with_the_same_noise(play: Play, tmp_path: Path) -> None:
    (expected,) = play("Count", num=1)
    kwargs: dict[str, Any] = {"file": str(tmp_path / "count"), "fails": 2}
    (retried,) = play("Sometimes", num=1, kwargs=kwargs, retries=2)
    assert retried.attempts == 3
    assert_same_bits([retried], [expected])

    kwargs["file"] += "2"
    (given_up,) = play("Sometimes", num=1, kwargs=kwargs, retries=1)
    assert (given_up.ended, given_up.attempts) == ("environment", 2)
    assert "RuntimeError: out of order" in given_up.problem
    assert re.search(r"\n    at .*games\.py, line \d+$", given_up.problem)


@pytest.mark.long
def test_a_late_environment_is_retried_while_others_play(play: Play, tmp_path: Path) -> None:
    kwargs = {"file": str(tmp_path / "count")}
    trajectories = play("HangsOnce", num=2, kwargs=kwargs, retries=2)
    assert [trajectory.attempts for trajectory in trajectories] == [2, 1]
    assert_same_bits(trajectories, play("Count", num=2))


@pytest.mark.long
def test_a_trajectory_ends_at_its_own_timeout(play: Play) -> None:
    """No single reply of its environment is late."""
    kwargs = {"turns": 2, "sleep": 60.0, "slow_row": 0}
    late, *others = play(
        "Count", num=3, kwargs=kwargs, step_timeout_s=90.0, trajectory_timeout_s=4.0, retries=2
    )
    assert (late.ended, late.attempts) == ("deadline", 1)
    assert late.problem == "it took longer than environment.trajectory_timeout_s=4 s"
    assert 4.0 < late.since - late.began < 30.0
    assert {other.ended for other in others} == {"terminated"}


def test_a_trajectory_whose_process_ends_fails(play: Play) -> None:
    (trajectory,) = play("Dies", num=1)
    assert (trajectory.ended, trajectory.problem) == ("environment", "its process has ended")


def test_an_invalid_reply_of_an_environment_is_a_failure(play: Play) -> None:
    words = {
        "reset": "reset returned int 7, not a text, an Observation or None",
        "number": "step returned int 3, not an Observation or a TrajectoryEnd",
        "pair": "step returned tuple ('hm', 1.0), not an Observation or a TrajectoryEnd",
        "nan": "the reward is nan, not a finite number",
        "inf": "the reward is -inf, not a finite number",
        "no": "the reward is None, not a finite number",
        "word": "the reward is '1.0', not a finite number",
        "turn-nan": "the reward is nan, not a finite number",
        "turn-no": "the reward is None, not a finite number",
        "text": "the text of an Observation is int 5, not a string",
    }
    trajectories = play("Strange", num=len(words), kwargs={"answer": list(words)})
    for trajectory, expected in zip(trajectories, words.values(), strict=True):
        assert expected in trajectory.problem


def test_an_observation_that_leaves_no_room_ends_the_trajectory(play: Play) -> None:
    (trajectory,) = play("Says", num=1, kwargs={"text": "x" * WIDTH})
    assert (trajectory.ended, trajectory.num_turns) == ("length", 1)
    assert sampled_mask(trajectory).all()


def test_a_first_observation_that_is_too_long_fails_one_trajectory(play: Play) -> None:
    long, *others = play("Long", num=3)
    assert (long.ended, long.num_turns, long.is_left_out) == ("environment", 0, True)
    assert re.search(r"begins with \d+ tokens .* data\.max_prompt_length is 16", long.problem)
    assert {other.ended for other in others} == {"terminated"}


def test_lone_surrogates_in_observations_are_replaced(play: Play, tokenizer: Any) -> None:
    (trajectory,) = play("Says", num=1, kwargs={"text": "a\ud800b"}, max_turns=2)
    assert trajectory.ended == "max_turns"
    assert "a?b" in tokenizer.decode(trajectory.sample.tokens[~sampled_mask(trajectory)])


@pytest.mark.parametrize(
    ("name", "kwargs", "words"),
    [
        ("Nowhere", {}, "has no 'Nowhere'"),
        ("add", {}, "is neither an environment nor an agent"),
        ("NoReset", {}, "is neither an environment nor an agent"),
        ("MisspeltStep", {}, "tool stpe has no docstring.*mean 'step'.*methods other than reset"),
        ("NarrowStep", {}, r"step is called with \(the policy's text\)"),
        ("ByPlace", {}, "reset is called with keyword arguments, but 'row' is positional-only"),
        ("Count", {"turn": 2}, r"environment.kwargs=\{'turn': 2\}: .*'turn'"),
    ],
)
def test_a_class_that_is_no_environment_is_rejected(
    name: str, kwargs: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        EnvironmentSpec(f"{HERE}:{name}", kwargs).load()


def test_a_file_without_a_class_is_not_mistaken_for_an_adapter() -> None:
    with pytest.raises(ConfigError, match=r"^environment=env\.py is not the path [^?]*$"):
        EnvironmentSpec("env.py").load()


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import os; os._exit(3)", "could not be loaded: its process ended with exit code 3"),
        ("import os, time; os.kill(os.getppid(), 9); time.sleep(9)", "its supervisor are gone"),
        (
            "raise SystemExit(2)",
            r"^environment=\S+ends.py:Any cannot be imported: it ends the proce",
        ),
    ],
)
def test_code_that_ends_its_process_is_rejected(tmp_path: Path, code: str, words: str) -> None:
    (tmp_path / "ends.py").write_text(code, encoding="utf-8")
    with pytest.raises(ConfigError, match=words):
        EnvironmentHost(EnvironmentSpec(f"{tmp_path}/ends.py:Any"), 1.0)


def test_each_environment_has_its_own_limits_and_metrics(model: Any, tokenizer: Any) -> None:
    names = ("plain", "short", "slow", "late")
    spec = EnvironmentSpec(
        dict.fromkeys(names, f"{HERE}:Count"),
        dict.fromkeys(("slow", "late"), {"sleep": 60.0}),
    )
    by_name = {
        "short": {"max_turns": 1},
        "slow": {"step_timeout_s": 1.5},
        "late": {"step_timeout_s": 90, "trajectory_timeout_s": 3.0},
    }
    with closing(EnvironmentHost(spec, 30.0)) as host:
        loop = new_loop(model, tokenizer, host, paths=spec.path, by_name=by_name)
        rows = [starts(n, n + 1, environment=name)[0] for n, name in enumerate(names)]
        plain, short, slow, late = played = loop.play(rows, sampling_of(tokenizer), 9)
    assert (plain.ended, plain.num_turns) == ("terminated", 3)
    assert (short.ended, short.num_turns) == ("max_turns", 1)
    assert slow.problem == "no answer within environment.step_timeout_s=1.5 s"
    assert late.problem == "it took longer than environment.trajectory_timeout_s=3 s"
    batch = make_batch([one.sample for one in played], (LIMITS.prompt_width, WIDTH), 0, 0)
    infos = trajectory_columns(batch, played).non_tensor_batch["trajectory"].tolist()
    metrics = trajectory_metrics(infos)
    assert metrics["agents/num_turns/max"] == 3
    for name, num_turns, num_failed in (("plain", 3, 0), ("short", 1, 0), ("slow", 1, 1)):
        prefix = f"agents/by_environment/{name}"
        assert metrics[f"{prefix}/share"] == 0.25
        assert metrics[f"{prefix}/num_turns/mean"] == num_turns
        assert metrics[f"{prefix}/num_failed"] == num_failed


@pytest.mark.parametrize(
    ("by_name", "words"),
    [
        ({"ches": {"max_turns": 3}}, "contains only chess, go. Did you mean 'chess'"),
        ({"go": {"max_turn": 3}}, "trajectory_timeout_s to numbers. Did you mean 'max_turns'"),
        ({"go": {"max_turns": 1.5}}, "set max_turns, "),
        ({"go": {"max_turns": 0}}, "max_turns must be above 0"),
        ({"go": 3}, "set max_turns, "),
        ({"go": {"share": 1.0}}, "give each of chess, go a share"),
        ({"go": {"share": 0.3}, "chess": {"share": 0.6}}, "now it is 0.9"),
    ],
)
def test_invalid_settings_by_name_are_rejected(by_name: Any, words: str) -> None:
    paths = {"chess": f"{HERE}:Count", "go": f"{HERE}:Count"}
    with pytest.raises(ConfigError, match=re.escape("environment.by_name=")) as error:
        EnvironmentConfig(paths=paths, by_name=by_name).check_by_name()
    assert words in str(error.value)


def test_a_row_that_names_no_environment_is_an_error() -> None:
    with pytest.raises(ConfigError, match="column 'environment' is None, .* one of chess, go"):
        name_of({"chess": Kind([]), "go": Kind([])}, {})


def test_only_open_trajectories_take_file_handles(play: Play) -> None:
    before = len(os.listdir("/proc/self/fd"))
    play("Count", num=16, num_open=2, kwargs={"turns": 1})
    assert (
        len(os.listdir("/proc/self/fd")) <= before + 2 + 6
    )  # a socket per trajectory, and the host's


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
        if self.file.read_text() == str(os.getppid()):  # in the first host
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


def play_hogs(play: Play, tmp_path: Path, name: str, **settings: Any) -> list[Trajectory]:
    """Play four trajectories of an environment above, whose processes share 0.4 GiB."""
    path = tmp_path / "hogs.py"
    path.write_text(HOGS)
    settings |= {"kwargs": {"file": str(tmp_path / "first")}, "memory_gib": 0.4}
    return play("", path=f"{path}:{name}", step_timeout_s=50.0, **settings)


def test_trajectories_are_retried_after_too_much_memory_together(
    play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Their host is killed; a new host plays them again."""
    trajectories = play_hogs(play, tmp_path, "Hog", retries=1)
    assert [(one.ended, one.attempts) for one in trajectories] == [("terminated", 2)] * 4
    (message,) = [text for text in caplog.messages if "GiB" in text]
    assert re.search(
        r"used .* GiB of memory \(memory_gib=0.4\) \(limits: environment.sandbox", message
    )


def test_a_memory_error_names_the_sandbox_of_environments(play: Play, tmp_path: Path) -> None:
    for trajectory in play_hogs(play, tmp_path, "Greedy"):
        assert "MemoryError:  (its limit is environment.sandbox.memory_gib)" in trajectory.problem


def replies_of(host: EnvironmentHost, count: int) -> dict[int, dict[str, Any]]:
    """Return the next replies of so many environments, by number."""
    replies: dict[int, dict[str, Any]] = {}
    while len(replies) < count:
        replies |= dict(host.answers(1.0))
    return replies


def test_output_of_environments_has_a_prefix_and_a_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "hogs.py").write_text(HOGS)
    spec = EnvironmentSpec(f"{tmp_path}/hogs.py:Prints", {"file": str(tmp_path / "n")})
    with closing(EnvironmentHost(spec, 20.0)) as host:
        host.open(0, (0, 1), {})
        replies_of(host, 1)
        host.say(0, "a")
        replies_of(host, 1)
    lines = capfd.readouterr().out.splitlines()
    assert lines[0] == "(environment) a line"
    assert all(line.startswith("(environment) ") for line in lines if line)
    assert 2**15 < sum(map(len, lines)) < 2**17
    assert "further output of this process is dropped" in lines[-1]


class ScriptedHost:
    """A host whose environment's process ends while the engine samples."""

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
        if seconds or not self.script[0]:  # no reply until the policy's text is sent
            return []
        return [(0, self.script.pop(0))]


def test_an_environment_that_ends_while_the_engine_samples_is_retried(
    model: Any, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.agents.players.COLLECT_S", 0.0)  # poll the host after every token
    host: Any = ScriptedHost()
    loop = new_loop(model, tokenizer, host, retries=1)
    (trajectory,) = loop.play(starts(0, 1), sampling_of(tokenizer), 1)
    assert (trajectory.attempts, trajectory.ended, trajectory.num_turns) == (2, "terminated", 1)
    assert loop._engine.num_running == 0


class OddCalls(ScriptedHost):
    """A host whose environments end each trajectory after its first text."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, dict[str, Any]]] = []

    def open(self, number: Any, *_: Any) -> None:
        self.asked.append((number, {"text": None}))

    def say(self, *arguments: Any) -> None:
        end = {"end": True, "reward": 1.0, "call_like": "<odd_tool_call"}
        self.asked.append((arguments[0], end))

    def answers(self, seconds: float) -> list[tuple[int, dict[str, Any]]]:
        asked, self.asked = self.asked, []
        return asked


def test_a_text_like_a_call_in_another_form_is_noted_once(
    model: Any, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host: Any = OddCalls()
    loop = new_loop(model, tokenizer, host)
    loop.play(starts(0, 3), sampling_of(tokenizer), 3)
    (notice,) = [message for message in caplog.messages if "odd_tool" in message]
    assert "looks like a call" in notice
    assert "environment.tool_call_parser" in notice


def test_shared_memory_counts_once_against_the_limit(tmp_path: Path) -> None:
    """Eight processes share the 64 MiB of their code, within half a gigabyte."""
    (tmp_path / "heavy.py").write_text(
        "import time\nfrom workers.agents import TrajectoryEnd\nBALLAST = bytearray(b'x' * 2**26)\n"
        "class Heavy:\n    def reset(self, row):\n        return 'go'\n"
        "    def step(self, text):\n        time.sleep(1)\n        return TrajectoryEnd(1.0)\n"
    )
    spec = EnvironmentSpec(f"{tmp_path}/heavy.py:Heavy", sandbox=Sandbox(memory_gib=0.4))
    with closing(EnvironmentHost(spec, 20.0)) as host:
        for number in range(8):
            host.open(number, (0, number), {})
        assert not [reply for reply in replies_of(host, 8).values() if "failed" in reply]
        for number in range(8):
            host.say(number, "a")
        assert not [reply for reply in replies_of(host, 8).values() if "failed" in reply]
