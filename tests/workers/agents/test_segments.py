"""Chats that the template rewrites: each turn is trained on the context that its engine read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.agents.test_chat import CHATML, FORGETS
from tests.workers.agents.test_loop import HERE, assert_same_bits, new_loop, sampling_of, starts
from tests.workers.gradients import gradients
from tests.workers.samples import started, tiny_config
from trainer.cli.make_tiny import make_model, make_tokenizer
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec
from workers.agents.players import trajectory_columns
from workers.agents.trajectory import Trajectory
from workers.roles.actor import ActorWorker
from workers.rollout.base import EngineLimits
from workers.rollout.sample import Sample
from workers.rollout.sample import to_batch as make_batch
from workers.training.engine import INPUTS
from workers.training.microbatch import MicroBatchBudget, Rows
from workers.training.passes.forward_backward import Reading
from workers.training.passes.packing import RowPasses
from workers.training.row_scores import RowScores

PROMPT, WIDTH = 16, 160
SHORTENS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content[-2:] if not loop.last and m.role == 'assistant' else m.content }}",
)
"""Keeps two characters of an older turn."""
Play = Callable[..., list[Trajectory]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("segments")
    make_model(make_tokenizer()).save_pretrained(path / "model")
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder / "model")


@pytest.fixture
def play(model: Any, host_of: Callable[..., EnvironmentHost]) -> Play:
    """Return a function that plays an environment of `games` with a template."""

    def play_template(
        history: str = "retokenized",
        template: str = SHORTENS,
        name: str = "Count",
        num: int = 4,
        num_open: int = 64,
        width: int = WIDTH,
        truncated: bool = False,
        **settings: Any,
    ) -> list[Trajectory]:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        limits = EngineLimits(prompt_width=PROMPT, response_width=width, kv_cache_gib=0.5)
        host = host_of(EnvironmentSpec(f"{HERE}:{name}"), 5.0)
        loop = new_loop(model, tokenizer, host, limits, history_tokens=history, **settings)
        sampling = sampling_of(tokenizer, width, truncated_log_probs=truncated)
        return loop.play(starts(0, num), sampling, num_open)

    return play_template


def segments_of(sample: Sample) -> list[Sample]:
    """Return every segment as a separate sample."""
    begins = [0, *(begin + 1 for begin in sample.segments)]
    ends = [*sample.segments, len(sample.tokens)]
    prompts = [list(sample.prompt), *([int(sample.tokens[begin])] for begin in sample.segments)]
    return [
        Sample(
            prompt,
            tokens=sample.tokens[begin:end],
            log_probs=sample.log_probs[begin:end],
            versions=sample.versions[begin:end],
        )
        for prompt, begin, end in zip(prompts, begins, ends, strict=True)
    ]


def batch_of(trajectories: list[Trajectory]) -> DataProto:
    """Return the batch that the rollout makes."""
    batch = make_batch([one.sample for one in trajectories], (PROMPT, WIDTH), 0, 0)
    names = DataProto.from_dict(
        {"sample_index": torch.arange(len(trajectories))}, {"uid": ["uid"] * len(trajectories)}
    )
    return batch.union(names).union(trajectory_columns(batch, trajectories))


def sampled_values(batch: DataProto, name: str) -> torch.Tensor:
    values: torch.Tensor = batch.padded(name)[batch.padded("response_mask") != 0]
    return values


@pytest.mark.parametrize(
    ("history", "template", "packed"),
    [
        ("retokenized", SHORTENS, True),
        ("retokenized", SHORTENS, False),
        ("retokenized", FORGETS, True),
    ],
)
def test_the_trainers_log_probs_match_the_engines(
    history: str, template: str, packed: bool, play: Play, folder: Path
) -> None:
    trajectories = play(history, template)
    splits = history == "retokenized" and template == SHORTENS
    num_segments = {len(trajectory.sample.segments) for trajectory in trajectories}
    assert num_segments <= ({2} if splits else {0, 1, 2})
    batch = batch_of(trajectories)
    config = tiny_config(folder)
    config.actor_rollout_ref.model.use_remove_padding = packed
    actor = started(ActorWorker, config, 1)
    assert actor.engine.packs == packed
    log_probs = sampled_values(batch.union(actor.compute_log_prob(batch)[0]), "old_log_probs")
    rollout_log_probs = sampled_values(batch, "rollout_log_probs")
    torch.testing.assert_close(log_probs, rollout_log_probs, atol=1e-5, rtol=0)

    start, setting = trajectories[0].start, trajectories[0].setting
    segments = [part for one in trajectories for part in segments_of(one.sample)]
    rows = batch_of([Trajectory(start, setting, part, [0] * len(part.tokens)) for part in segments])
    of_rows = sampled_values(rows.union(actor.compute_log_prob(rows)[0]), "old_log_probs")
    torch.testing.assert_close(log_probs, of_rows, atol=1e-5, rtol=0)


def test_gradients_of_turns_match_separate_segments(play: Play, folder: Path) -> None:
    """The gradient of seq-mean against one plain pass over each segment."""
    trajectories = play(num=2)
    batch = batch_of(trajectories)
    actor = started(ActorWorker, tiny_config(folder, loss_agg_mode="seq-mean-token-mean"), 1)
    batch = batch.union(actor.compute_log_prob(batch)[0])
    advantages = torch.tensor([[0.5], [-0.5]]) * batch.padded("response_mask")
    batch = batch.set_columns({"advantages": advantages, "returns": advantages})
    computed = gradients(actor, batch, ("old_log_probs", "advantages"), MicroBatchBudget(rows=2))

    module = actor.engine.module
    module.zero_grad()
    for trajectory, advantage in zip(trajectories, (0.5, -0.5), strict=True):
        log_probs = []
        for part in segments_of(trajectory.sample):
            ids = torch.tensor([[*part.prompt, *part.tokens.tolist()]])
            logits = module(ids).logits[0, len(part.prompt) - 1 : -1].log_softmax(-1)
            chosen = logits.gather(1, part.tokens[:, None])[:, 0]
            log_probs.append(chosen[part.versions >= 0])
        (-advantage * torch.cat(log_probs).mean() / 2).backward()
    assert len(computed) > 10
    for name, weight in module.named_parameters():
        torch.testing.assert_close(computed[name], weight.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_reward_model_reads_only_the_last_segment(play: Play) -> None:
    trajectories = play(num=2)
    columns = Rows.from_batch(batch_of(trajectories), INPUTS).columns
    feed = RowPasses("packed").feed(columns, RowScores().reads(columns), torch.device("cpu"))
    last = [one.sample.tokens[one.sample.segments[-1] :] for one in trajectories]
    assert torch.equal(feed.inputs["input_ids"][0], torch.cat(last))
    positions = [place for tokens in last for place in range(len(tokens))]
    assert feed.inputs["position_ids"][0].tolist() == positions


def test_bits_of_segments_do_not_depend_on_the_order_of_replies(play: Play) -> None:
    assert_same_bits(play(name="Jitter", num_open=2), play())


def test_each_segment_has_its_own_noise() -> None:
    versions = torch.full((9,), -1, dtype=torch.int32)
    sample = Sample(
        [1],
        seed=5,
        tokens=torch.arange(9),
        finish_reason="abort",
        log_probs=torch.zeros(9),
        versions=versions,
    )
    segments = [replace(sample, segments=begins).last_segment(20) for begins in ((), (4,), (4, 7))]
    assert len({segment.seed for segment in segments}) == 3
    assert [list(segment.prompt) for segment in segments] == [[1], [4], [7]]
    assert [len(segment.prompt) + len(segment.tokens) for segment in segments] == [10, 5, 2]
    assert [segment.longest(20) for segment in segments] == [20, 15, 12]


def test_all_segments_share_the_width_of_a_response(play: Play) -> None:
    settings: dict[str, Any] = {"max_turns": 99, "max_tokens_per_turn": None}
    for trajectory in play(num=4, truncated=True, **settings, width=40):
        sample = trajectory.sample
        assert trajectory.ended in ("length", "terminated")
        assert len(sample.tokens) <= 40
        assert len(trajectory.turns) == len(sample.tokens) == len(sample.log_probs)
        assert sample.truncated_log_probs is not None


def test_a_limit_of_a_segment_includes_its_prompt(play: Play) -> None:
    settings: dict[str, Any] = {"max_tokens_per_turn": None, "max_tokens_per_segment": 30}
    for history in ("sampled", "retokenized"):
        for trajectory in play(history, max_turns=99, **settings):
            lengths = [len(one.prompt) + len(one.tokens) for one in segments_of(trajectory.sample)]
            assert max(lengths) <= 30
            assert trajectory.ended in ("length", "terminated")
            if trajectory.ended == "length" and trajectory.sample.is_sampled[-1]:
                assert (lengths[-1], trajectory.sample.finish_reason) == (30, "length")


def test_a_trajectory_that_the_template_rejects_is_left_out(play: Play) -> None:
    rejects = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and m.content|length == 6 %}"
        "{{ raise_exception('six letters') }}{% endif %}{{ m.content }}",
    )
    trajectories = play(template=rejects)
    assert {trajectory.ended for trajectory in trajectories} <= {"environment", "terminated"}
    problems = [one.problem for one in trajectories if one.ended == "environment"]
    assert problems
    assert all("six letters" in problem for problem in problems)


def test_a_model_that_cannot_pack_rows_rejects_segments(play: Play) -> None:
    passes = RowPasses("packed", border=99)
    for history, is_rejected in (("retokenized", True), ("sampled", False)):
        columns = Rows.from_batch(batch_of(play(history, num=1)), INPUTS).columns
        context: Any = nullcontext()
        if is_rejected:
            context = pytest.raises(ConfigError, match="=sampled")
        with context:
            passes.feed(columns, Reading().reads(columns), torch.device("cpu"))
