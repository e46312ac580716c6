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
from tests.workers.agents.test_loop import HERE, fresh_engine, same_bits, starts
from tests.workers.gradients import gradients
from tests.workers.samples import started, tiny_config
from trainer.cli.make_tiny import make_model, make_tokenizer
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.agents.chat import TurnRenderer
from workers.agents.environment import EnvironmentSpec
from workers.agents.host import EnvironmentHost
from workers.agents.loop import TurnLoop
from workers.agents.players import trajectory_columns
from workers.agents.trajectory import Trajectory
from workers.config import EnvironmentConfig
from workers.roles.actor import ActorWorker
from workers.rollout.base import EngineLimits, SamplingParams
from workers.rollout.batches import batch_of as make_batch
from workers.rollout.sample import Sample
from workers.training.engine import INPUTS
from workers.training.microbatch import MicroBatchBudget, Rows
from workers.training.packing import last_token_reads, packed_feed, response_reads
from workers.training.row_proof import RowPasses

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
    def played(
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
        defaults = {"max_tokens_per_turn": 6, "step_timeout_s": 5.0, "retries": 0}
        config = EnvironmentConfig(history_tokens=history, **{**defaults, **settings})
        host = host_of(EnvironmentSpec(f"{HERE}:{name}"), config.step_timeout_s)
        stops = (tokenizer.eos_token_id,)
        limits = EngineLimits(prompt_width=PROMPT, response_width=width, kv_cache_gb=0.5)
        chat = TurnRenderer(tokenizer, [], stops)
        engine = fresh_engine(model, limits)
        loop = TurnLoop(engine, host, chat, config)
        sampling = SamplingParams(
            max_tokens=width, stop_token_ids=stops, truncated_log_probs=truncated
        )
        return loop.play(starts(0, num), sampling, num_open)

    return played


def parts_of(sample: Sample) -> list[Sample]:
    """Return every segment as a separate sample."""
    begins = [0, *(begin + 1 for begin in sample.segments)]
    ends = [*sample.segments, len(sample.tokens)]
    firsts = [list(sample.prompt), *([int(sample.tokens[begin])] for begin in sample.segments)]
    return [
        Sample(
            first,
            tokens=sample.tokens[begin:end],
            log_probs=sample.log_probs[begin:end],
            versions=sample.versions[begin:end],
        )
        for first, begin, end in zip(firsts, begins, ends, strict=True)
    ]


def batch_of(played: list[Trajectory]) -> DataProto:
    """Return the batch that the rollout makes."""
    batch = make_batch([one.sample for one in played], (PROMPT, WIDTH), 0, 0)
    names = DataProto.from_dict(
        {"sample_index": torch.arange(len(played))}, {"uid": ["uid"] * len(played)}
    )
    return batch.union(names).union(trajectory_columns(batch, played))


def apart(played: list[Trajectory]) -> DataProto:
    """Return every segment as a separate row."""
    parts = [part for one in played for part in parts_of(one.sample)]
    start, setting = played[0].start, played[0].setting
    return batch_of([Trajectory(start, setting, part, [0] * len(part.tokens)) for part in parts])


def drawn(batch: DataProto, name: str) -> torch.Tensor:
    found: torch.Tensor = batch.padded(name)[batch.padded("response_mask") != 0]
    return found


@pytest.mark.parametrize(
    ("history", "template", "packed"),
    [
        ("retokenized", SHORTENS, True),
        ("retokenized", SHORTENS, False),
        ("retokenized", FORGETS, True),
    ],
)
def test_the_trainers_log_probs_are_the_engines(
    history: str, template: str, packed: bool, play: Play, folder: Path
) -> None:
    played = play(history, template)
    splits = history == "retokenized" and template == SHORTENS
    assert {len(one.sample.segments) for one in played} <= ({2} if splits else {0, 1, 2})
    batch = batch_of(played)
    config = tiny_config(folder)
    config.actor_rollout_ref.model.use_remove_padding = packed
    actor = started(ActorWorker, config, 1)
    assert actor.engine.packs == packed
    ours = drawn(batch.union(actor.compute_log_prob(batch)[0]), "old_log_probs")
    torch.testing.assert_close(ours, drawn(batch, "rollout_log_probs"), atol=1e-5, rtol=0)

    single = apart(played)
    theirs = drawn(single.union(actor.compute_log_prob(single)[0]), "old_log_probs")
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)


def test_one_turn_or_more_learn_as_rows_of_their_own_would(play: Play, folder: Path) -> None:
    """The gradient of seq-mean, next to that of a plain pass over each segment."""
    played = play(num=2)
    batch = batch_of(played)
    actor = started(ActorWorker, tiny_config(folder, loss_agg_mode="seq-mean-token-mean"), 1)
    batch = batch.union(actor.compute_log_prob(batch)[0])
    lead = torch.tensor([[0.5], [-0.5]]) * batch.padded("response_mask")
    batch = batch.set_columns({"advantages": lead, "returns": lead})
    found = gradients(actor, batch, ("old_log_probs", "advantages"), MicroBatchBudget(rows=2))

    module = actor.engine.module
    module.zero_grad()
    for one, sign in zip(played, (0.5, -0.5), strict=True):
        log_probs = []
        for part in parts_of(one.sample):
            whole = torch.tensor([[*part.prompt, *part.tokens.tolist()]])
            logits = module(whole).logits[0, len(part.prompt) - 1 : -1].log_softmax(-1)
            chosen = logits.gather(1, part.tokens[:, None])[:, 0]
            log_probs.append(chosen[part.versions >= 0])
        (-sign * torch.cat(log_probs).mean() / 2).backward()
    assert len(found) > 10
    for name, weight in module.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_a_reward_model_reads_the_last_segment_alone(play: Play) -> None:
    played = play(num=2)
    columns = Rows.take(batch_of(played), INPUTS).columns
    feed = packed_feed(columns, last_token_reads(columns), torch.device("cpu"))
    expected = [one.sample.tokens[one.sample.segments[-1] :] for one in played]
    assert torch.equal(feed.inputs["input_ids"][0], torch.cat(expected))
    assert feed.inputs["position_ids"][0].tolist() == [
        place for part in expected for place in range(len(part))
    ]


def test_bits_of_segments_do_not_depend_on_who_waits_for_whom(play: Play) -> None:
    expected = play()
    same_bits(play(name="Jitter"), expected)
    same_bits(play(num_open=1), expected)


def test_segments_draw_with_noise_of_their_own() -> None:
    sample = Sample([1], key=5, tokens=torch.arange(9), finish_reason="abort")
    versions = torch.full((9,), -1, dtype=torch.int32)
    sample = replace(sample, log_probs=torch.zeros(9), versions=versions)
    asked = [replace(sample, segments=places).last_segment(20) for places in ((), (4,), (4, 7))]
    assert len({one.key for one in asked}) == 3
    assert [list(one.prompt) for one in asked] == [[1], [4], [7]]
    assert [len(one.prompt) + len(one.tokens) for one in asked] == [10, 5, 2]
    assert [one.longest(20) for one in asked] == [20, 15, 12]


def test_all_segments_share_the_room_of_a_response(play: Play) -> None:
    settings: dict[str, Any] = {"max_turns": 99, "max_tokens_per_turn": None}
    for one in play(num=4, truncated=True, **settings, width=40):
        assert one.ended in ("length", "terminated")
        assert len(one.sample.tokens) <= 40
        assert len(one.turns) == len(one.sample.tokens) == len(one.sample.log_probs)
        assert one.sample.truncated_log_probs is not None


def test_what_a_template_refuses_is_left_out_with_its_words(play: Play) -> None:
    refuses = CHATML.replace(
        "{{ m.content }}",
        "{% if m.role == 'assistant' and m.content|length == 6 %}"
        "{{ raise_exception('six letters') }}{% endif %}{{ m.content }}",
    )
    played = play(template=refuses)
    assert {one.ended for one in played} <= {"environment", "terminated"}
    problems = [one.problem for one in played if one.ended == "environment"]
    assert problems
    assert all("six letters" in problem for problem in problems)


def test_a_model_whose_rows_share_no_pass_refuses_segments(play: Play) -> None:
    passes = RowPasses("packed", border=99)
    for history, refused in (("retokenized", True), ("sampled", False)):
        columns = Rows.take(batch_of(play(history, num=1)), INPUTS).columns
        expected: Any = pytest.raises(ConfigError, match="=sampled") if refused else nullcontext()
        with expected:
            passes.feed(columns, response_reads(columns), torch.device("cpu"))
