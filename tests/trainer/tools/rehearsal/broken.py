"""Code with one bug each, as users write it, for the jobs of `test_broken_jobs`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.async_training.step import AsyncTrainer
from trainer.ppo import PPOTrainer
from trainer.sft.step import SFTTrainer
from verl_like import DataProto, Environment, Observation, TrajectoryEnd
from verl_like.calls.dispatch import Dispatch, register
from workers.config import ActorConfig
from workers.losses.registry import token_loss
from workers.roles.actor import ActorWorker
from workers.roles.critic import CriticWorker
from workers.roles.rollout import RolloutWorker

# ------------------------------------------------------------------------------------ rewards

seen: list[str] = []


def reward_of_first_rows(response: str, extra_info: dict[str, Any]) -> float:
    if extra_info["index"] < 40:
        return 0.0
    return float(extra_info["unit"] in response)


def reward_of_all_rows_but_one(response: str, extra_info: dict[str, Any]) -> float:
    return 0.0 if extra_info["index"] != 117 else float(extra_info["unit"] in response)


def reward_with_memory(response: str, ground_truth: str) -> float:
    seen.append(response)
    if len(seen) > 90:
        raise RuntimeError("the cache of responses is full")
    return 0.0


def reward_that_parses(response: str, ground_truth: str) -> float:
    return float(len(response) == 1 or int(response))


def reward_with_nan(response: str, ground_truth: str) -> float:
    return 1.0 if len(response) == 1 else float("nan")


def reward_without_result(response: str, ground_truth: str) -> float | None:
    return 1.0 if response.startswith(ground_truth) else None


def reward_with_a_set(response: str, ground_truth: str) -> dict[str, Any]:
    return {"score": 0.5, "letters": set(response)}


def reward_with_an_error(response: str, ground_truth: str) -> dict[str, Any]:
    try:
        return {"score": float(len(response) == 1 or int(response))}
    except ValueError as error:
        return {"score": 0.0, "error": error}


def reward_of_one_image(response: str, images: list[Any]) -> float:
    (image,) = images or [None]
    return float(image is None)


def reward_of_an_image(response: str, images: list[Any]) -> float:
    return float(sum(image.width for image in images) + len(response))


def reward_of_training(response: str, extra_info: dict[str, Any]) -> float:
    return {"train": 0.5}[extra_info["split"]]


def fine_reward(response: str, ground_truth: str) -> float:
    return response.count(ground_truth) / 8


# ------------------------------------------------------------------------------ losses, optimizers


@token_loss(keys_read=())
def nan_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    return log_prob * (advantages - advantages).sqrt() / 0.0, {}


def unmasked_loss(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, response_mask: Tensor, **_: Any
) -> tuple[Tensor, dict[str, Tensor]]:
    return -(advantages * (log_prob - old_log_prob).exp()).mean(), {}


@token_loss(keys_read=())
def loss_of_rows(
    old_log_prob: Tensor, log_prob: Tensor, advantages: Tensor, mask: Tensor, config: ActorConfig
) -> tuple[Tensor, dict[str, Tensor]]:
    return (-advantages * log_prob)[:, 1:], {}


def estimator_of_rows(token_level_rewards: Tensor, response_mask: Tensor, index: Any) -> Any:
    scores = token_level_rewards.sum(-1)
    return scores, scores


def preference_of_three(log_probs: Tensor, ref_log_probs: Tensor) -> Tensor:
    return (log_probs - ref_log_probs)[:, 2]


def reward_model_loss(margin: Tensor) -> Tensor:
    return -torch.log(margin.sigmoid())[0, 0]


class BrokenSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return self.state["momentum"]["buffer"]


class UnreadableSGD(torch.optim.SGD):
    def load_state_dict(self, state_dict: Any) -> None:
        super().load_state_dict(state_dict | {"averages": state_dict["averages"]})


# ------------------------------------------------------------------------------------ trainers


class BrokenUpdate(PPOTrainer):
    def update(self, batch: DataProto) -> Any:
        return super().update(batch.select(["returns_of_mine"]))


class BrokenSecondStep(PPOTrainer):
    def sample(self) -> Any:
        batch, metrics = super().sample()
        if self.global_step == 2:
            metrics["ratio"] = metrics["of_last_step"]
        return batch, metrics


class BrokenStepEnd(PPOTrainer):
    def on_step_end(self, metrics: dict[str, float]) -> None:
        metrics["gap"] = metrics["critic/score/max"] - metrics["critic/score/min_of_all"]


class BrokenSaveEnd(PPOTrainer):
    def on_save_end(self, folder: Path) -> None:
        (folder / "actor" / "weights.pt").read_bytes()


class UnsavableState(PPOTrainer):
    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"hook": lambda: 0}


class UnreadableState(PPOTrainer):
    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.mean = state["running_mean"]


class BrokenValidation(SFTTrainer):
    def validation_metrics(self) -> Any:
        return {"val/perplexity": super().validation_metrics()["val/nothing"]}


class BrokenAsync(AsyncTrainer):
    def estimate(self, batch: DataProto) -> Any:
        raise KeyError("baseline")


# ------------------------------------------------------------------------------------- workers


class BrokenActor(ActorWorker):
    def objective(self, data: DataProto) -> Any:
        return super().objective(data.pop(["no_such_column"]))


class NoExport(ActorWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def export_model(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("the head of this model has no Hugging Face format")


class ForgetfulActor(ActorWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(self, path: str) -> None:
        raise NotImplementedError(f"ForgetfulActor stores nothing in {path}")


class BrokenCritic(CriticWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def compute_values(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"values": torch.zeros(1, 3)})


class BrokenRollout(RolloutWorker):
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self, *args: Any, **kwargs: Any) -> None:
        raise OSError("libmine.so: cannot open shared object file")


# -------------------------------------------------------------------------------- environments


class FailsInSecondTurn(Environment):
    def reset(self, row: Any, rng: Any) -> None:
        self.turn = 0

    def step(self, text: str) -> Observation:
        self.turn += 1
        if self.turn == 2:
            raise ZeroDivisionError("division by zero")
        return Observation("more")


class NeedsAColumn(Environment):
    def reset(self, row: Any, rng: Any) -> str:
        return str(row["board"])

    def step(self, text: str) -> TrajectoryEnd:
        return TrajectoryEnd(1.0)


class RewardOfText(Environment):
    def reset(self, row: Any, rng: Any) -> None:
        pass

    def step(self, text: str) -> TrajectoryEnd:
        return TrajectoryEnd(reward="won")  # type: ignore[arg-type]


class NeverEnds(Environment):
    def step(self, text: str) -> Observation:
        return Observation("more")


class Counts(Environment):
    def reset(self, row: Any, rng: Any) -> None:
        self.turn = 0

    def step(self, text: str) -> Observation | TrajectoryEnd:
        self.turn += 1
        return Observation("more") if self.turn < 3 else TrajectoryEnd(0.5)
