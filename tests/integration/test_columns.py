"""The table of columns is checked against the batches of real steps."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.integration.runs import POLICY_ALONE, overrides, with_experts, write_jsonl
from tests.workers.models.vision import picture, write_model
from tests.workers.samples import started, tiny_config
from trainer import load_config, run
from trainer.ppo import updating
from trainer.ppo.stages import PPOTrainer
from trainer.ppo.updating import add_chosen_tokens
from trainer.rollouts.samples import EXTRA
from verl_like.batch.protocol import DataProto
from workers.agents import Environment, TrajectoryEnd
from workers.columns import COLUMNS
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticCopyWorker, CriticWorker
from workers.roles.reference import ReferenceWorker, TeacherWorker
from workers.roles.reward_model import RewardModelWorker
from workers.roles.rollout import RolloutWorker
from workers.training.engine import INPUTS

WIDTHS = {"P": 16, "R": 8, "T": 16 + 8, "layers": 3, "choices": 2}
METHODS = {
    "actor.compute_log_prob": ActorWorker,
    "critic.compute_values": CriticWorker,
    "ref.compute_ref_log_prob": ReferenceWorker,
    "reward_model.compute_rm_score": RewardModelWorker,
    "rollout.generate_sequences": RolloutWorker,
    "teacher.compute_teacher_log_prob": TeacherWorker,
}
Columns = dict[str, torch.Tensor | np.ndarray]


def columns_of(batch: DataProto) -> Columns:
    assert batch.batch is not None, "every batch of a step has tensors"
    columns = {**dict(batch.batch.items()), **batch.non_tensor_batch}
    assert {len(values) for values in columns.values()} == {len(batch)}
    return columns


class Recorder:
    """Records the columns that methods return, and those of the batches that stages receive."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.written: dict[str, Columns] = defaultdict(dict)
        self.received: dict[str, Columns] = {}
        for name, cls in METHODS.items():
            method = name.partition(".")[2]
            patch.setattr(cls, method, self.recording_result(name, getattr(cls, method)))
        patch.setattr(PPOTrainer, "generate", self.recording_argument(PPOTrainer.generate))
        patch.setattr(updating, "add_chosen_tokens", self.recording_samples)

    def recording_result(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def recorded(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            self.written[name] |= columns_of(result[0] if isinstance(result, tuple) else result)
            return result

        return recorded

    def recording_argument(self, stage: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(stage)
        def recorded(trainer: PPOTrainer, batch: DataProto, *args: Any, **kwargs: Any) -> Any:
            self.received[stage.__name__] = columns_of(batch)
            return stage(trainer, batch, *args, **kwargs)

        return recorded

    def recording_samples(self, *args: Any) -> DataProto:
        batch = add_chosen_tokens(*args)
        self.received["update_actor"] = columns_of(batch)
        return batch


class Pair(Environment):
    """Two players who speak once, at the same time."""

    players = ("a", "b")

    def reset(self, row: dict[str, Any], rng: np.random.Generator) -> dict[str, str]:
        return {"a": "", "b": ""}

    def step(self, text: str, player: str) -> dict[str, TrajectoryEnd]:
        return {player: TrajectoryEnd(1.0)}


@pytest.fixture(scope="module")
def recorders(
    tiny_dir: Path, classifier: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Recorder]:
    """Steps with every role, option and algorithm that adds a column."""
    folder = tmp_path_factory.mktemp("columns")
    every_role = [
        "reward.model.enable=true",
        f"reward.model.path={classifier}",
        "+actor_rollout_ref.rollout.sampling_kwargs.truncated_log_probs=true",
        "actor_rollout_ref.rollout.top_k=20",
        "actor_rollout_ref.actor.ppo_epochs=2",
        "actor_rollout_ref.actor.shuffle=true",
        "correction=decoupled_token_is",
        f"distillation.teacher_model.model_path={tiny_dir}/model",
        "distillation.use_task_rewards=true",
    ]
    own_columns = [
        "algorithm.adv_estimator=optimal_token_baseline",
        "actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov",
        "algorithm.use_kl_in_reward=false",
    ]
    remax = ["algorithm.adv_estimator=remax", "algorithm.use_kl_in_reward=false"]
    players = [
        *POLICY_ALONE,
        "environment=tests.integration.test_columns:Pair",
        "environment.max_tokens_per_turn=2",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.router_replay.mode=R3",
        with_experts(tiny_dir, folder / "model", num_hidden_layers=WIDTHS["layers"]),
    ]
    picture(33, 33).save(folder / "a.png")
    rows = [
        {
            "prompt": [{"role": "user", "content": "<image>a"}],
            "images": ["a.png"],
            "data_source": "verl_like/tiny_letters",
            "reward_model": {"ground_truth": "a"},
        }
    ]
    images = [
        *POLICY_ALONE,
        f"actor_rollout_ref.model.path={write_model('qwen2_vl', folder / 'vision')}",
        f"data.train_files={write_jsonl(folder / 'rows.jsonl', rows * 8)}",
    ]
    recorders = []
    runs = {"all": every_role, "own": own_columns, "remax": remax, "players": players}
    runs["images"] = images
    for name, changes in runs.items():
        with pytest.MonkeyPatch.context() as patch:
            recorders.append(Recorder(patch))
            changes = [*changes, "trainer.backend=local", "trainer.total_training_steps=1"]
            changes.append("data.train_batch_size=4")
            run(load_config(overrides(tiny_dir, folder / name, *changes)))
    # asynchronous runs have this role in a generator's process; its other column is the critic's
    critic_copy = started(CriticCopyWorker, tiny_config(tiny_dir))
    critic_copy.engine.commit(1)
    samples = DataProto.from_dict(
        {name: recorders[0].received["update_actor"][name] for name in INPUTS}
    )
    columns = columns_of(critic_copy.compute_values(samples))
    del columns["values"]
    recorders[0].written["critic_copy.compute_values"] = columns
    return recorders


def as_table_row(values: torch.Tensor | np.ndarray) -> tuple[str, str]:
    """Return the shape in the table's letters and the dtype."""
    letters = {width: letter for letter, width in WIDTHS.items()}
    shape = ", ".join(["rows", *(letters[width] for width in values.shape[1:])])
    return f"[{shape}]", str(values.dtype).removeprefix("torch.")


@pytest.mark.long
def test_columns_have_the_documented_shapes_and_dtypes(recorders: list[Recorder]) -> None:
    rows = {}
    for recorder in recorders:
        received = recorder.received["generate"], recorder.received["update_actor"]
        for columns in (*received, *recorder.written.values()):
            rows |= {name: as_table_row(values) for name, values in columns.items()}
    of_the_user = [name for name in rows if name.startswith(EXTRA)]
    names = ("function_score", "model_score", "environment_score", "skipped")
    assert of_the_user == [f"reward_extra/{name}" for name in names]
    for name in of_the_user:
        del rows[name]
    assert rows == {name: (column.shape, column.dtype) for name, column in COLUMNS.items()}


@pytest.mark.long
def test_columns_of_workers_name_the_methods_that_write_them(recorders: list[Recorder]) -> None:
    writers: dict[str, set[str]] = {name: set() for name in COLUMNS}
    for recorder in recorders:
        for method, columns in recorder.written.items():
            for name in columns:
                writers[name].add(method)
    named = {
        name: {f"{column.role}.{column.method}"} if column.role else set()
        for name, column in COLUMNS.items()
    }
    assert named == writers


@pytest.mark.long
def test_columns_of_the_data_loader_are_marked(recorders: list[Recorder]) -> None:
    loaded = recorders[0].received["generate"]
    named = {name for name, column in COLUMNS.items() if column.is_loaded}
    assert named == set().union(*(recorder.received["generate"] for recorder in recorders))
    for name in ("input_ids", "attention_mask", "position_ids"):
        assert as_table_row(loaded[name]) == ("[rows, P]", COLUMNS[name].dtype)
