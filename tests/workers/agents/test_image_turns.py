"""Trajectories with images: what is sampled, what the trainer computes, and what is rejected."""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.workers.agents.test_loop import HERE, assert_same_bits, starts
from tests.workers.agents.test_players import starts_of
from tests.workers.models.test_image_input import Case, close, make_case
from tests.workers.models.vision import picture
from tests.workers.rollout.test_images import engine_of
from verl_like.errors import ConfigError
from verl_like.process.sandbox import Sandbox
from workers.agents.chat import TurnRenderer, with_refs
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.players import TurnLoop
from workers.agents.trajectory import Trajectory
from workers.config import EnvironmentConfig
from workers.images import ImageRef, image_ref
from workers.rollout.base import SamplingParams
from workers.training.passes.attention import packed_rows

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "internvl", "llava", "smolvlm")
PADDED = ("gemma3", "qwen3_5")
TURNS = ((1, 0, 2), (0, 2, 1), (2, 1, 0), (0, 0, 0), (0, 1, 2), (3, 0, 1))
"""By trajectory: the number of images that the reset and each observation show."""


def new_loop(
    case: Case, folder: Path, name: str, host: Any, **settings: Any
) -> tuple[TurnLoop, SamplingParams]:
    tokenizer = case.reader.processor.tokenizer
    tokenizer.name_or_path = str(folder)
    stops = (tokenizer.eos_token_id, *case.reader.stop_ids)
    engine = engine_of(name, case.module, folder, response_width=400)
    config = EnvironmentConfig(**{"max_tokens_per_turn": 6, "retries": 0, **settings})
    chat = TurnRenderer(tokenizer, [], stops)
    return TurnLoop(engine, host, chat, config), SamplingParams(
        max_tokens=400, stop_token_ids=stops
    )


def play(
    case: Case,
    folder: Path,
    name: str,
    host: Any,
    rows: Sequence[Mapping[str, Any]] = ({},) * len(TURNS),
    num_open: int = 64,
    **settings: Any,
) -> list[Trajectory]:
    """Play one trajectory for each of `TURNS`; `rows` have further columns."""
    loop, sampling = new_loop(case, folder, name, host, **settings)
    begun = []
    for number, counts in enumerate(TURNS):
        shown = [[str(folder / f"{(number + n) % 4}.png") for n in range(c)] for c in counts]
        row = {"class": "Shows", "settings": {"turns": shown}, "agent": "looks"}
        row |= {"arguments": {"turns": shown}, **rows[number]}
        begun += starts(number, number + 1, **row)
    numbers = loop.submit(begun, sampling, num_open, case.reader.stop_ids)
    ended = loop.collect()
    return [ended[number] for number in numbers]


@pytest.fixture
def host(host_of: Callable[..., EnvironmentHost]) -> EnvironmentHost:
    return host_of(EnvironmentSpec(f"{HERE}:OfRow"), 30.0)


def in_training(case: Case, trajectories: Sequence[Trajectory]) -> Case:
    """Return the rows of trajectories, as the trainer gets them."""
    rows = [[*t.sample.prompt, *t.sample.tokens.tolist()] for t in trajectories]
    refs = [[ImageRef(*ref) for ref in t.sample.images] for t in trajectories]
    return Case(case.module, case.reader, rows, refs, [0] * len(rows))


def sampled_log_probs(trajectory: Trajectory, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rollout's log-probs of the sampled tokens, and those of the row's logits."""
    sample = trajectory.sample
    logits = logits[len(sample.prompt) - 1 :][: len(sample.tokens)]
    ours = logits.log_softmax(-1).gather(1, sample.tokens[:, None])[:, 0]
    return sample.log_probs[sample.is_sampled], ours[sample.is_sampled].float()


@pytest.mark.parametrize(
    ("name", "family"),
    [*(("native", f) for f in FAMILIES), *(("hf", f) for f in ("qwen2_5_vl", *PADDED))],
)
def test_a_trajectory_with_images_has_the_log_probs_of_one_pass_of_transformers(
    name: str, family: str, tmp_path: Path, host: EnvironmentHost
) -> None:
    case = make_case(family, tmp_path)
    case.module.float()
    trajectories = play(case, tmp_path, name, host)
    rows = in_training(case, trajectories)
    every = list(range(len(rows.rows)))
    assert [t.num_turns for t in trajectories].count(3) >= 2
    expected = []
    for number, trajectory in enumerate(trajectories):
        shown = sum(TURNS[number][: trajectory.num_turns])
        assert len(trajectory.sample.images) == shown
        if trajectory.sample.tokens[-1] == case.reader.token_id:  # it ended the trajectory
            rows.rows[number].pop()
        with torch.no_grad():
            expected.append(rows.of_transformers(number))
        sampled, ours = sampled_log_probs(trajectory, expected[-1])
        torch.testing.assert_close(sampled, ours, atol=1e-5, rtol=1e-4)

    with torch.no_grad():
        assert close(rows.passes("padded", every), torch.cat(expected), 1e-5)
        if family in PADDED:
            return
        with packed_rows(case.module):
            for shares in (False, True):
                assert close(rows.passes("packed", every, shares), torch.cat(expected), 1e-5)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "smolvlm"])
def test_bits_depend_neither_on_stored_keys_nor_on_other_trajectories(
    family: str, tmp_path: Path, host: EnvironmentHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(family, tmp_path)
    case.module.float()
    expected = play(case, tmp_path, "native", host)
    assert_same_bits(play(case, tmp_path, "native", host, num_open=3), expected)
    monkeypatch.setattr("workers.rollout.native.engine.with_states", lambda entry, *_: entry)
    assert_same_bits(play(case, tmp_path, "native", host, num_open=1), expected)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_a_chat_that_is_rendered_again_has_all_its_images_in_each_segment(
    name: str, tmp_path: Path, host: EnvironmentHost
) -> None:
    case = make_case("qwen2_vl", tmp_path)
    case.module.float()
    tokenizer = case.reader.processor.tokenizer
    marked = "{%- for message in messages %}{{ messages | length }}"  # rewrites earlier text
    case.reader.processor.tokenizer.chat_template = tokenizer.chat_template.replace(
        "{%- for message in messages %}", marked
    )
    trajectories = play(case, tmp_path, name, host, history_tokens="retokenized")
    assert [len(t.sample.images) for t in trajectories[:2]] == [1 + 1 + 3, 0 + 2 + 3]
    rows, parts = in_training(case, trajectories), Case(case.module, case.reader, [], [], [])
    rows.begins = [
        [0, *(len(t.sample.prompt) + begin for begin in t.sample.segments)] for t in trajectories
    ]
    for number, trajectory in enumerate(trajectories):
        begins, refs, taken = rows.begins[number], rows.refs[number], 0
        assert len(begins) == trajectory.num_turns
        for turn, begin in enumerate(begins):
            end = [*begins, None][turn + 1]
            count = sum(TURNS[number][: turn + 1])
            parts.rows.append(rows.rows[number][begin:end])
            parts.refs.append(refs[taken : taken + count])
            parts.starts.append(0)
            taken += count
    with torch.no_grad():
        expected = torch.cat([parts.of_transformers(n) for n in range(len(parts.rows))])
        ends = torch.tensor([len(row) for row in rows.rows]).cumsum(0)
        every = list(range(len(rows.rows)))
        assert close(rows.passes("padded", every), expected, 1e-5)
        with packed_rows(case.module):
            assert close(rows.passes("packed", every), expected, 1e-5)
    for trajectory, logits in zip(trajectories, expected.tensor_split(ends[:-1]), strict=True):
        sampled, ours = sampled_log_probs(trajectory, logits)
        torch.testing.assert_close(sampled, ours, atol=1e-5, rtol=1e-4)


@pytest.fixture
def agents(host_of: Callable[..., EnvironmentHost]) -> EnvironmentHost:
    spec = EnvironmentSpec("tests.workers.agents.agents:any_of_these")
    return host_of(replace(spec, sandbox=Sandbox(network=False)), 30.0)


@pytest.mark.parametrize("forgets", [False, True])
def test_the_images_of_an_agents_requests_are_in_its_trajectory(
    forgets: bool, tmp_path: Path, agents: EnvironmentHost
) -> None:
    """The agent uses OpenAI's client, and sends the whole chat with each request."""
    case = make_case("qwen2_vl", tmp_path)
    case.module.float()
    shown = [
        [[f"{tmp_path}/{(number + n) % 4}.png" for n in range(c)] for c in counts]
        for number, counts in enumerate(TURNS)
    ]
    further = [{"arguments": {"turns": turns, "forgets": forgets}} for turns in shown]
    trajectories = play(case, tmp_path, "native", agents, rows=further)
    rows = in_training(case, trajectories)
    for number, trajectory in enumerate(trajectories):
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")
        names = [path for turn in shown[number] for path in turn]
        expected = [image_ref(name).sha for name in names]
        assert [ref.sha for ref in rows.refs[number]] == expected
        assert len(trajectory.sample.segments) == forgets
        if not forgets:
            with torch.no_grad():
                sampled, ours = sampled_log_probs(trajectory, rows.of_transformers(number))
            torch.testing.assert_close(sampled, ours, atol=1e-5, rtol=1e-4)


def test_a_chat_with_another_image_of_the_same_size_is_read_again(
    tmp_path: Path, agents: EnvironmentHost
) -> None:
    case = make_case("qwen2_vl", tmp_path)
    case.module.float()
    picture(40, 70, seed=9).save(tmp_path / "same_size.png")
    paths = [f"{tmp_path}/0.png", f"{tmp_path}/same_size.png"]
    loop, sampling = new_loop(case, tmp_path, "native", agents)
    sampling = replace(sampling, logit_bias=((1, 1e4),))  # the turn ends as the template writes it
    row = {"agent": "swaps", "arguments": dict(zip(("first", "second"), paths, strict=True))}
    loop.submit(starts(0, 1, **row), sampling, 64, case.reader.stop_ids)
    (trajectory,) = loop.collect().values()
    assert (trajectory.ended, trajectory.problem) == ("terminated", "")
    assert [sha for _, sha, *_ in trajectory.sample.images] == [image_ref(p).sha for p in paths]
    assert len(trajectory.sample.segments) == 1


def test_an_agent_can_send_the_prompt_of_a_row_with_images(
    tmp_path: Path, agents: EnvironmentHost
) -> None:
    case = make_case("llava", tmp_path)
    case.module.float()
    loop, sampling = new_loop(case, tmp_path, "native", agents)
    ref = case.refs[2][0]
    parts = [{"type": "image", **ref._asdict()}, {"type": "text", "text": "what?"}]
    prompt = [{"role": "user", "content": parts}]
    row = {"agent": "looks_at_its_prompt", "arguments": {}, "prompt": prompt}
    loop.submit(starts(0, 1, **row), sampling, 64, case.reader.stop_ids)
    (trajectory,) = loop.collect().values()
    assert [sha for _, sha, *_ in trajectory.sample.images] == [ref.sha]


def test_an_agent_reads_in_words_why_an_image_is_rejected(
    tmp_path: Path, agents: EnvironmentHost
) -> None:
    case = make_case("llava", tmp_path)
    case.module.float()
    loop, sampling = new_loop(case, tmp_path, "native", agents)
    good = "data:;base64," + b64encode((tmp_path / "0.png").read_bytes()).decode()
    urls = [
        (f"{tmp_path}/0.png", "an image must be a data: URL"),
        (f"file://{tmp_path}/0.png", "an image must be a data: URL"),
        ("https://example.com/0.png", "an image must be a data: URL"),
        ("data:image/png;base64,AAAA", "not a readable image"),
        ("data:image/png,AAAA", "it is not base64"),
    ]
    without_key = [(good, "sample 1: it has images, but the rows of this run have none")]
    for number, (tokens, rejected) in enumerate(((case.reader.stop_ids, urls), ((), without_key))):
        row = {"agent": "sends_image_urls", "arguments": {"urls": rejected}}
        loop.submit(starts(number, number + 1, **row), sampling, 64, tokens)
        (trajectory,) = loop.collect().values()
        assert (trajectory.ended, trajectory.problem) == ("terminated", "")


def test_an_answer_names_a_file_only_with_its_hash(tmp_path: Path) -> None:
    """Otherwise a process in a sandbox could show any image of the machine to the policy."""
    picture(20, 30).save(tmp_path / "a.png")
    ref = image_ref(tmp_path / "a.png")
    part = {"type": "image", **ref._asdict()}
    chat = [{"role": "user", "content": [part]}]
    assert with_refs(chat) == chat
    for wrong in ({"sha": "0" * 64}, {"sha": None}, {"url": str(tmp_path / "a.png"), "sha": ""}):
        with pytest.raises(ValueError, match="a.png does not have the hash"):
            with_refs([{"role": "user", "content": [part | wrong]}])


BAD = {
    "missing": ("gone.png is not readable: No such file or directory", ["gone.png"]),
    "empty": ("empty.png is not a readable image: it is empty", ["empty.png"]),
    "places": ("an Observation has 1 images, and 2 places for them", ["0.png"]),
    "no list": ("the images of an Observation are str '0.png', not a list", "0.png"),
    "large": ("it has 10500 x 10000 pixels, more than 100,000,000", ["large.png"]),
}


def test_bad_images_of_an_observation_are_failures_with_the_reason(
    tmp_path: Path, host: EnvironmentHost
) -> None:
    from PIL import Image

    case = make_case("llava", tmp_path)
    case.module.float()
    (tmp_path / "empty.png").touch()
    Image.new("1", (10_500, 10_000)).save(tmp_path / "large.png")
    loop, sampling = new_loop(case, tmp_path, "native", host)
    begun: list[Any] = []
    for number, (_, names) in enumerate(BAD.values()):
        images = names if names == "0.png" else [str(tmp_path / name) for name in names]
        text = "<image><image>" if len(begun) == 2 else "a"
        row = {"class": "Says", "settings": {"text": text, "images": images}}
        begun += starts(number, number + 1, **row)
    loop.submit(begun, sampling, 64, case.reader.stop_ids)
    for trajectory, (words, _) in zip(loop.collect().values(), BAD.values(), strict=True):
        assert (trajectory.ended, trajectory.num_turns) == ("environment", 1)
        assert re.search(rf"{words}.*\n    at .*games\.py, line \d+$", trajectory.problem)


def test_images_that_the_run_does_not_expect_name_environment_and_turn(
    tmp_path: Path, host: EnvironmentHost, model: Any, tokenizer: Any
) -> None:
    case = make_case("llava", tmp_path)
    case.module.float()
    loop, sampling = new_loop(case, tmp_path, "native", host)
    row = {"class": "Says", "settings": {"text": "a", "images": [str(tmp_path / "0.png")]}}
    loop.submit(starts(3, 4, **row), sampling, 64)
    words = "environment, turn 2 of sample 3: it has images, but the rows of this run have none.*"
    with pytest.raises(ConfigError, match=f"{words}Set environment.images=true"):
        loop.collect()

    model.save_pretrained(tmp_path / "text")
    tokenizer.save_pretrained(tmp_path / "text")
    loop._engine.__dict__.pop("image_reader")
    loop._engine.model_path = str(tmp_path / "text")
    loop.submit(starts(3, 4, **row), sampling, 64)
    words = (
        "environment, turn 2 of sample 3: it has images, but the model .*text: model type 'llama'"
    )
    with pytest.raises(ConfigError, match=f"{words} does not read images"):
        loop.collect()


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_a_trajectory_ends_after_a_sampled_image_token(
    engine: str, tmp_path: Path, host: EnvironmentHost, agents: EnvironmentHost
) -> None:
    """The row ends with this token, so its images are still those that were shown."""
    case = make_case("qwen2_vl", tmp_path)
    case.module.float()
    token, shown = case.reader.token_id, [[f"{tmp_path}/0.png"], [], [f"{tmp_path}/1.png"]]
    row = {"class": "Shows", "settings": {"turns": shown}}
    row |= {"agent": "looks", "arguments": {"turns": shown}}
    for played_by in (host, agents):
        loop, sampling = new_loop(case, tmp_path, engine, played_by)
        sampling = replace(sampling, logit_bias=((token, 1e4),))
        loop.submit(starts(0, 1, **row), sampling, 64, (token,))
        (trajectory,) = loop.collect().values()
        assert (trajectory.ended, trajectory.problem) == ("max_turns", "")
        assert trajectory.sample.tokens.tolist() == [token]
        rows = in_training(case, [trajectory])
        places = case.reader.places(torch.tensor(rows.rows[0]), rows.refs[0], "")
        assert int((places > 0).sum()) == case.reader.num_tokens(rows.refs[0][0])
        assert not places[-1]


def test_each_player_has_the_images_of_its_own_observations(
    tmp_path: Path, host_of: Callable[..., EnvironmentHost]
) -> None:
    case = make_case("llava", tmp_path)
    case.module.float()
    duel = host_of(EnvironmentSpec(f"{HERE}:OfRowForTwo"), 20.0)
    loop, sampling = new_loop(case, tmp_path, "native", duel)
    paths = [f"{tmp_path}/{number}.png" for number in range(3)]
    begun = starts_of(1, **{"class": "ShowsTwo", "settings": {"paths": paths}})
    loop.submit(begun, sampling, 64, case.reader.stop_ids)
    white, black = loop.collect().values()
    assert (white.ended, black.ended, white.problem) == ("terminated", "terminated", "")
    shown = [[sha for _, sha, *_ in player.sample.images] for player in (white, black)]
    hashes = [image_ref(path).sha for path in paths]
    assert shown == [[hashes[0], hashes[2]], [hashes[1]]]
