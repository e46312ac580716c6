"""On-policy distillation: advantages from a teacher's log-probs, and runs."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.recording import RecordingTrainer
from tests.integration.runs import FEW_ROWS, calls, numbers, overrides
from trainer import load_config, run
from trainer.cli.check import watch_lines
from trainer.ppo.dataflow import describe
from trainer.ppo.memory import role_memories
from trainer.ppo.scoring import compute_distillation_advantage, distill
from trainer.stubs import trace_step
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from workers.config import reward_configs

PATH = "distillation.teacher_model.model_path"
KL = "distillation/reverse_kl"
NO_DECAY = "actor_rollout_ref.actor.optim.weight_decay=0"


@pytest.fixture(scope="module")
def teacher(tiny_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model after some steps on only a, b, c and d."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path_factory.mktemp("teacher")
    tokenizer = AutoTokenizer.from_pretrained(tiny_dir / "model")
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_dir / "model")
    torch.manual_seed(0)
    letters = torch.tensor(tokenizer("abcd", add_special_tokens=False)["input_ids"])
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(15):
        ids = letters[torch.randint(4, (16, 20))]
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    return folder


def settings(tiny_dir: Path, folder: Path, teacher: Path, *more: str) -> list[str]:
    mini_batch = "actor_rollout_ref.actor.ppo_mini_batch_size"
    dropped = ("critic.", "algorithm.", mini_batch)
    common = [key for key in overrides(tiny_dir, folder) if not key.startswith(dropped)]
    local = ("trainer.backend=local", "algorithm=distillation", f"{PATH}={teacher}")
    return [*common, *local, *more]


def batch_of(**columns: torch.Tensor) -> DataProto:
    return DataProto.from_dict(columns)


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
def test_the_advantage_is_the_log_prob_gap_to_the_teacher(gamma: float) -> None:
    torch.manual_seed(0)
    policy, teacher = torch.randn(2, 3, 5, dtype=torch.float64)
    mask = torch.tensor([[1, 1, 1, 1, 1], [1, 0, 1, 1, 0], [0, 0, 0, 0, 0]])
    policy[mask == 0] = float("nan")  # never read

    expected = torch.zeros(3, 5, dtype=torch.float64)
    for row in range(3):
        inside = [t for t in range(5) if mask[row, t]]
        for place, t in enumerate(inside):
            for later, s in enumerate(inside[place:]):
                expected[row, t] += gamma**later * (teacher[row, s] - policy[row, s])

    advantages = compute_distillation_advantage(policy, teacher, mask, gamma)
    torch.testing.assert_close(advantages, expected)


def test_advantages_of_teacher_and_rewards_add_up(
    tiny_dir: Path, tmp_path: Path, teacher: Path
) -> None:
    more = ("distillation.use_task_rewards=true", "distillation.coef=0.5")
    config = load_config(
        settings(tiny_dir, tmp_path, teacher, *more, "algorithm.adv_estimator=grpo")
    )
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    batch = batch_of(
        old_log_probs=torch.tensor([[-1.0, -2.0, 9.0], [-3.0, -1.0, -1.0]]),
        teacher_log_prob=torch.tensor([[-2.0, -1.0, 9.0], [-1.0, -1.0, -1.0]]),
        advantages=torch.tensor([[1.0, 1.0, 0.0], [-1.0, -1.0, -1.0]]),
        returns=torch.ones(2, 3),
        response_mask=mask,
    )
    batch, metrics = distill(batch, config)
    expected = torch.tensor([[0.5, 1.5, 0.0], [0.0, -1.0, -1.0]])
    torch.testing.assert_close(batch.batch["advantages"], expected)
    assert torch.equal(batch.batch["returns"], torch.ones(2, 3))
    assert metrics[KL] == pytest.approx((0.0 - 2 / 3) / 2)


@pytest.fixture(scope="module")
def whole(
    tiny_dir: Path, teacher: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """The metrics of twelve steps."""
    folder = tmp_path_factory.mktemp("whole")
    more = ("trainer.total_training_steps=12", "actor_rollout_ref.actor.optim.lr=3e-3")
    run(load_config(settings(tiny_dir, folder, teacher, *more)))
    return numbers(folder)


def test_the_policy_approaches_its_teacher(whole: list[dict[str, Any]]) -> None:
    first, last = whole[0][KL], whole[-1][KL]
    assert first > 1
    assert last < first / 2


def test_a_reward_is_optional_and_only_logged(
    tiny_dir: Path, tmp_path: Path, teacher: Path, whole: list[dict[str, Any]]
) -> None:
    assert whole[0]["critic/score/mean"] == 0
    more = (
        "trainer.total_training_steps=2",
        "actor_rollout_ref.actor.optim.lr=3e-3",
        "reward.list=[{name: function, kind: function}]",
    )
    config = load_config(settings(tiny_dir, tmp_path, teacher, *more))
    assert [reward.name for reward in reward_configs(config)] == ["function"]
    run(config)
    for line, unrewarded in zip(numbers(tmp_path), whole[:2], strict=True):
        assert line["critic/score/max"] > 0
        rewards = ("critic/score", "critic/rewards")
        same = {name: unrewarded[name] for name in unrewarded if not name.startswith(rewards)}
        assert {name: line[name] for name in same} == same


def test_a_teacher_equal_to_the_policy_changes_nothing(tiny_dir: Path, tmp_path: Path) -> None:
    short = (*FEW_ROWS, NO_DECAY, "trainer.total_training_steps=1")
    run(load_config(settings(tiny_dir, tmp_path, tiny_dir / "model", *short)), RecordingTrainer)
    (line,) = numbers(tmp_path)
    assert line[KL] == line["actor/grad_norm"] == 0
    before, after = RecordingTrainer.last.history
    assert after == before
    assert before["teacher"] == before["actor"]


def test_placement_and_resume_change_no_number(
    tiny_dir: Path, tmp_path: Path, teacher: Path
) -> None:
    colocated, split = tmp_path / "colocated", tmp_path / "split"
    one_step, two_steps = (f"trainer.total_training_steps={count}" for count in (1, 2))
    run(load_config(settings(tiny_dir, colocated, teacher, *FEW_ROWS, two_steps)))
    pools = ("placement=split", "trainer.n_gpus_per_node=2", "trainer.save_freq=1", *FEW_ROWS)
    for length in (one_step, two_steps):
        run(load_config(settings(tiny_dir, split, teacher, *pools, length)))
    assert numbers(split) == numbers(colocated)
    assert len(calls(split, "compute_teacher_log_prob")) == 2


@pytest.mark.slow
def test_two_ranks_of_a_teacher_match_one(tiny_dir: Path, tmp_path: Path, teacher: Path) -> None:
    lines = []
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        split = ("placement=split", "trainer.n_gpus_per_node=3", "trainer.total_training_steps=1")
        pools = (
            "resource_pool_spec.actor_rollout_ref_pool=[1]",
            f"resource_pool_spec.critic_pool=[{ranks}]",
        )
        run(load_config(settings(tiny_dir, folder, teacher, *split, *pools)))
        (line,) = numbers(folder)
        lines.append(line)
    for name in (KL, "actor/pg_loss", "actor/grad_norm", "critic/advantages/max"):
        assert lines[1][name] == pytest.approx(lines[0][name], rel=1e-5)


def test_graph_and_memory_show_the_teacher(tiny_dir: Path, tmp_path: Path, teacher: Path) -> None:
    more = ("placement=split", "trainer.n_gpus_per_node=2", "trainer.backend=ray")
    config = load_config(settings(tiny_dir, tmp_path, teacher, *more))
    assert config.role_mapping == {
        "actor_rollout": "actor_rollout_ref_pool",
        "teacher": "critic_pool",
    }
    text = describe(config, *trace_step(config))
    assert "actor.compute_log_prob ‖ teacher.compute_teacher_log_prob" in text
    assert "gae" not in text
    assert [line.partition(":")[0] for line in watch_lines(config)] == ["policy loss vanilla"]
    of_teacher = {memory.role: memory for memory in role_memories(config, "cpu")}["teacher"]
    assert of_teacher.weights > 0
    assert of_teacher.moments == 0


def test_another_tokenizer_is_rejected(tiny_dir: Path, tmp_path: Path, teacher: Path) -> None:
    from transformers import AutoTokenizer

    other = tmp_path / "other"
    shutil.copytree(teacher, other)
    tokenizer = AutoTokenizer.from_pretrained(other)
    tokenizer.add_tokens(["~"])
    tokenizer.save_pretrained(other)
    with pytest.raises(ConfigError, match="role 'teacher'.*1 tokens differ, such as '~'"):
        run(load_config(settings(tiny_dir, tmp_path / "run", other)))


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ("algorithm.use_kl_in_reward=true", "acts on rewards, and distillation.use_task_rewards="),
        ("algorithm.use_pf_ppo=true", "use_pf_ppo=true acts on rewards"),
        ("algorithm.score_clip=5", "score_clip=5.0 acts on rewards"),
        ("algorithm.rollout_correction.bypass_mode=true", "bypass_mode=true computes none"),
    ],
)
def test_keys_that_distillation_does_not_read_are_rejected(
    tiny_dir: Path, tmp_path: Path, teacher: Path, more: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(settings(tiny_dir, tmp_path, teacher, more))
