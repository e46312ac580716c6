"""Pairs of runs with one planted difference, or with none: what `bisect` says about them.

    python -m tests.trainer.tools.bisect.pairs [ours] [verl] [trl]

It prints a line per pair, and the totals: first stage right, cause named, none reported. `verl` and
`trl` need verl 0.9.1 and TRL 1.16:

    uv pip install --no-deps --target peers verl==0.9.1 trl==1.16 tensordict codetiming accelerate
    PYTHONPATH=.:peers python -m tests.trainer.tools.bisect.pairs
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, overrides
from trainer import load_config, run
from trainer.cli import make_tiny
from trainer.cli.bisect import bisect
from trainer.ppo.advantages.registry import ADVANTAGE_ESTIMATORS
from trainer.tools.bisect.sides import open_side
from verl_like.record import Recorder
from workers.config import ActorConfig
from workers.losses.aggregate import agg_loss
from workers.losses.kl import kl_penalty
from workers.losses.registry import get_policy_loss


class Pair(NamedTuple):
    """Two sides that differ in one thing; with an empty stage they do not."""

    system: str
    changes: Mapping[str, Any]
    stage: str = ""
    cause: str = ""
    """A part of the setting or sentence that names the cause."""
    common: Mapping[str, Any] = {}
    """Settings of both sides."""


ALGORITHM, ACTOR, ROLLOUT = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
TWO_UPDATES = {f"{ACTOR}.ppo_mini_batch_size": 2}
PLANTED = "tests.trainer.tools.bisect.planted"


def planted(name: str) -> dict[str, str]:
    return {"trainer.cls": f"{PLANTED}.{name}"}


CUT_PROMPTS = {"data.truncation": "left", "data.max_prompt_length": 6}
OURS = (
    Pair("ours", {f"{ALGORITHM}.norm_adv_by_std_in_grpo": False}, "advantages", "norm_adv_by_std"),
    Pair("ours", {f"{ALGORITHM}.adv_estimator": "rloo"}, "advantages", "rloo"),
    Pair("ours", {f"{ALGORITHM}.score_clip": 0.1}, "scores", "score_clip"),
    Pair("ours", {f"{ALGORITHM}.use_kl_in_reward": True}, "rewards", "use_kl_in_reward"),
    Pair("ours", {f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}, "loss", "seq-mean-token-mean"),
    Pair("ours", {f"{ACTOR}.kl_loss_coef": 0.1}, "loss", "kl_loss_coef"),
    # in step 1 the KL is 0, and only its gradient differs
    Pair("ours", {f"{ACTOR}.kl_loss_type": "kl"}, "gradients", "kl_loss_type"),
    Pair("ours", {f"{ACTOR}.entropy_coeff": 0.01}, "loss", "entropy_coeff"),
    Pair("ours", {f"{ACTOR}.clip_ratio": 0.001}, "loss", "clip_ratio", TWO_UPDATES),
    Pair("ours", {f"{ACTOR}.optim.lr": 2e-3}, "learning rate", "optim.lr", TWO_UPDATES),
    Pair("ours", {f"{ACTOR}.ppo_epochs": 2}, "loss", "ppo_epochs"),
    Pair("ours", {f"{ACTOR}.grad_clip": 1e-3}, "optimizer", "grad_clip"),
    Pair("ours", {f"{ACTOR}.optim.weight_decay": 0.5}, "optimizer", "weight_decay"),
    Pair("ours", {f"{ACTOR}.optim.betas": [0.5, 0.9]}, "optimizer", "betas"),
    Pair("ours", {f"{ACTOR}.optim.lr": 2e-3}, "learning rate", "optim.lr"),
    Pair("ours", {f"{ACTOR}.optim.lr_warmup_steps": 3}, "learning rate", "warmup"),
    Pair("ours", {"trainer.seed": 7}, "prompts", "seed"),
    Pair("ours", {"data.shuffle": False}, "prompts", "data.shuffle"),
    Pair("ours", {f"{ROLLOUT}.temperature": 0.5}, "samples", "temperature"),
    Pair("ours", {"data.max_response_length": 3}, "samples", "max_response_length"),
    Pair("ours", planted("EndTokenCut"), "mask", "end token"),
    Pair("ours", {"data.truncation": "right"}, "prompts", "truncation", CUT_PROMPTS),
    Pair("ours", planted("LogProbsWithoutTemperature"), "log-probs", "temperature=1.0", {
        f"{ROLLOUT}.temperature": 0.7, **TWO_UPDATES}),
    Pair("ours", planted("ShiftedLogProbs"), "log-probs", "one token later", TWO_UPDATES),
    Pair("ours", planted("StaleWeights"), "samples", "stale", {f"{ACTOR}.optim.lr": 1e-2}),
    Pair("ours", planted("EqualSeeds"), "samples", "seed"),
    Pair("ours", planted("RepeatedPrompts"), "prompts", "repeats 1 step"),
    Pair("ours", {"actor_rollout_ref.model.compute_dtype": "bfloat16"}, "log-probs", "bfloat16", {
        f"{ROLLOUT}.dtype": "float32", **TWO_UPDATES}),
    *(Pair("ours", changes) for changes in (
        {},
        {"trainer.n_gpus_per_node": 2},
        {f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1, f"{ACTOR}.use_dynamic_bsz": False},
        {"actor_rollout_ref.model.share_prefixes": False},
        {"trainer.save_freq": 1},
        {"trainer.total_training_steps": 3},
        {"trainer.logger": ["console"]},
    )),
)  # fmt: skip
VERL = (
    Pair("verl", {"norm_adv_by_std_in_grpo": (False, True)}, "advantages", "norm_adv_by_std_in"),
    Pair("verl", {"adv_estimator": ("rloo", "grpo")}, "advantages", "rloo"),
    Pair("verl", {"adv_estimator": ("opo", "grpo")}, "advantages", "opo"),
    Pair("verl", {"adv_estimator": ("reinforce_plus_plus", "grpo")}, "advantages", "plus_plus"),
    Pair("verl", {"adv_estimator": ("gae", "gae"), "lam": (0.9, 1.0)}, "advantages", "lam=0.9"),
    Pair("verl", {"adv_estimator": ("gae", "gae"), "gamma": (0.9, 1.0)}, "advantages", "gamma=0.9"),
    Pair("verl", {"loss_agg_mode": ("seq-mean-token-mean", "token-mean")}, "loss", "seq-mean"),
    Pair("verl", {"loss_agg_mode": ("seq-mean-token-sum", "token-mean")}, "loss", "token-sum"),
    Pair("verl", {"clip_ratio_high": (0.28, 0.2)}, "loss", "clip_ratio_high=0.28"),
    Pair("verl", {"clip_ratio_low": (0.1, 0.2)}, "loss", "clip_ratio_low=0.1"),
    Pair("verl", {"kl_loss_type": ("kl", "low_var_kl")}, "loss", "kl_loss_type=kl"),
    Pair("verl", {"micro_batch": (6, 24)}, "loss", "micro-batch of 6"),
    Pair("verl", {"clip_ratio_c": (1.2, 3.0)}, "loss", "clip_ratio_c=1.2"),
    Pair("verl", {"policy_loss": ("gspo", "vanilla")}, "loss", "gspo"),
    Pair("verl", {"kl_in_reward": (0.05, 0.0)}, "rewards", "kl_coef=0.05"),
    Pair("verl", {"overlong": (1.0, 0.0)}, "rewards", "per token of the response"),
    *(Pair("verl", changes) for changes in (
        {},
        {"norm_adv_by_std_in_grpo": (False, False)},
        {"adv_estimator": ("rloo", "rloo")},
        {"adv_estimator": ("gae", "gae"), "lam": (0.9, 0.9)},
        {"loss_agg_mode": ("seq-mean-token-mean", "seq-mean-token-mean")},
        {"kl_loss_type": ("kl", "kl")},
        {"clip_ratio_high": (0.28, 0.28)},
        {"clip_ratio_c": (1.2, 1.2)},
        {"kl_in_reward": (0.05, 0.05)},
    )),
)  # fmt: skip
TRL = (
    Pair("trl", {"scale_rewards": ("none", True)}, "advantages", "norm_adv_by_std_in_grpo=false"),
    Pair("trl", {"scale_rewards": ("batch", True)}, "advantages", "batch"),
    Pair("trl", {"epsilon": (1e-4, 1e-6)}, "advantages", "epsilon=0.0001"),
    Pair("trl", {"loss_type": ("grpo", "token-mean")}, "loss", "seq-mean-token-mean"),
    Pair("trl", {"loss_type": ("dr_grpo", "token-mean")}, "loss", "seq-mean-token-sum-norm"),
    Pair("trl", {"beta": (0.1, 0.0)}, "loss", "kl_loss_coef=0.1"),
    Pair("trl", {"learning_rate": (1e-3, 2e-3)}, "learning rate", "optim.lr"),
    Pair("trl", {"lr_scheduler_type": ("linear", "constant")}, "learning rate", "decays"),
    Pair("trl", {"lr_scheduler_type": ("linear", "late")}, "learning rate", "one step late"),
    Pair("trl both", {"reward_weights": ([0.5], [1.0])}, "scores", "reward_weights"),
    Pair("trl both", {"mask_truncated_completions": (True, False)}, "mask", "truncated rows"),
    Pair("trl both", {"attention_dropout": (0.5, 0.0)}, "samples", "attention_dropout"),
    Pair("trl both", {"completion_only_loss": (True, False), "trainer": ("SFT", "SFT")}, "loss",
         "completion_only_loss"),
    *(Pair("trl", changes) for changes in (
        {},
        {"scale_rewards": ("none", False)},
        {"loss_type": ("grpo", "seq-mean-token-mean")},
        {"loss_type": ("dr_grpo", "seq-mean-token-sum-norm")},
        {"beta": (0.1, 0.1)},
        {"num_generations": (2, 2)},
    )),
    Pair("trl both", {"mask_truncated_completions": (True, True)}),
)  # fmt: skip
PAIRS = (*OURS, *VERL, *TRL)

BASE = (
    *("trainer.backend=local", "trainer.record=all", "trainer.total_training_steps=2"),
    *(*POLICY_ALONE, *FEW_ROWS),
    *("data.max_response_length=6", "actor_rollout_ref.rollout.n=4"),
    *("actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.kl_loss_coef=0.01"),
)


class Sides:
    """Makes the sides of pairs; sides that several pairs have are made once."""

    def __init__(self, folder: Path, tiny: Path | None = None) -> None:
        self.folder = folder
        self.tiny = make_tiny.make(folder / "tiny") if tiny is None else tiny
        self.sides: dict[str, str] = {}

    def of(self, pair: Pair) -> tuple[str, str]:
        """Return the two arguments of `bisect`."""
        if pair.system == "ours":
            return self.ours(pair.common), self.ours({**pair.common, **pair.changes})
        settings = [{n: values[side] for n, values in pair.changes.items()} for side in (0, 1)]
        if pair.system == "verl":
            return self.formulas("verl", settings[0]), self.formulas("verl-like", settings[1])
        theirs = self.trl(settings[0])
        if pair.system == "trl both":
            return theirs, self.trl(settings[1])
        return theirs, self.ours_of(theirs.removeprefix("trl:"), settings[1])

    def once(self, name: str, make: Callable[[Path], str]) -> str:
        if name not in self.sides:
            self.sides[name] = make(self.folder / f"side{len(self.sides)}")
        return self.sides[name]

    def ours(self, changes: Mapping[str, Any]) -> str:
        """Return a run of ours with these settings; an equal one is made again."""

        def make(folder: Path) -> str:
            few = self.tiny / "train.parquet"
            settings = [f"{key}={x}" for key, x in changes.items()]
            base = [*BASE, f"data.train_files={few}", *settings]
            run(load_config(overrides(self.tiny, folder, *base)))
            return str(folder)

        name = f"ours {dict(changes)}"
        return self.once(f"{name} again" if name in self.sides and not changes else name, make)

    def with_dropout(self, folder: Path, dropout: float) -> Path:
        """Return a copy of the model whose attention has dropout in training."""
        copy = folder.with_name(f"{folder.name}_model")
        shutil.copytree(self.tiny / "model", copy)
        config = json.loads((copy / "config.json").read_text())
        text = json.dumps(config | {"attention_dropout": dropout})
        (copy / "config.json").write_text(text)
        return copy

    def formulas(self, system: str, settings: Mapping[str, Any]) -> str:
        """Return a record of three steps that a framework's own functions compute."""

        def make(folder: Path) -> str:
            recorder = Recorder(folder, system, {f"{ACTOR}.optim.lr": 1e-3})
            for seed in (1, 2, 3):
                recorder.step(seed, **computed(system, samples(seed), settings))
            return str(folder)

        return self.once(f"{system} {dict(settings)}", make)

    def trl(self, settings: Mapping[str, Any]) -> str:
        """Return a record of TRL's own GRPO trainer."""

        def make(folder: Path) -> str:
            from tests.trainer.tools.bisect.test_trl import record

            arguments = {"max_steps": 3, **settings}
            arguments.pop("epsilon", None)
            model = self.tiny / "model"
            if (dropout := arguments.pop("attention_dropout", None)) is not None:
                model = self.with_dropout(folder, dropout)
            record(arguments.pop("trainer", "GRPO"), model, folder, **arguments)
            return f"trl:{folder / 'record'}"

        return self.once(f"trl {dict(settings)}", make)

    def ours_of(self, theirs: str, settings: Mapping[str, Any]) -> str:
        """Return a record of our formulas on the samples of TRL's record."""
        folder = self.folder / f"side{len(self.sides)}"
        self.sides[str(folder)] = str(folder)
        loss_type = settings.get("loss_type", "token-mean")
        beta, lr = settings.get("beta", 0.0), settings.get("learning_rate", 1e-3)
        keys = {f"{ACTOR}.optim.lr": lr, f"{ACTOR}.loss_agg_mode": loss_type}
        recorder = Recorder(folder, "verl-like", keys | {f"{ACTOR}.kl_loss_coef": beta})
        side = open_side(theirs)
        for number in [number for number in side.steps if number > 0]:
            arrays = side.load(number)
            mask = torch.tensor(arrays["response_mask"]).bool()
            rewards = torch.zeros(mask.shape)
            last = arrays["response_lengths"] - 1
            rewards[torch.arange(len(mask)), torch.tensor(last)] = torch.tensor(arrays["scores"])
            advantages, _ = ADVANTAGE_ESTIMATORS.look_up("grpo")(
                rewards, mask, arrays["group"], settings.get("epsilon", 1e-4),
                settings.get("scale_rewards", True),
            )  # fmt: skip
            loss = agg_loss(-advantages, mask, loss_type, loss_scale_factor=6)
            if beta:
                pair = (torch.tensor(arrays[name]) for name in ("log_probs", "ref_log_prob"))
                loss += beta * agg_loss(kl_penalty(*pair, "low_var_kl"), mask, loss_type)
            if settings.get("lr_scheduler_type") == "late":
                lr = side.steps[max(number - 1, 1)]["lr"]
            recorder.step(number, arrays | {"advantages": advantages}, loss=float(loss), lr=lr)
        return str(folder)


def samples(seed: int) -> dict[str, Any]:
    """Return samples of a step: 6 prompts with 4 samples each."""
    random, rows, width = np.random.default_rng(seed), 24, 7
    lengths = random.integers(2, width + 1, rows)
    mask = np.arange(width) < lengths[:, None]
    noise = [random.normal(size=(rows, width)) for _ in range(3)]
    old = -np.abs(noise[0])
    return {
        "prompts": np.repeat(random.integers(3, 50, (6, 5)), 4, 0),
        "responses": random.integers(3, 50, (rows, width)),
        "response_mask": mask.astype(np.int64),
        "response_lengths": lengths,
        "group": np.arange(rows) // 4,
        "scores": random.normal(size=rows).astype(np.float32),
        "old_log_probs": (old * mask).astype(np.float32),
        "log_probs": ((old + 0.2 * noise[1]) * mask).astype(np.float32),
        "ref_log_prob": ((old + 0.3 * noise[2]) * mask).astype(np.float32),
        "values": (noise[1] * mask).astype(np.float32),
    }


def computed(system: str, arrays: dict[str, Any], settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's arrays, pg_loss, kl_loss and loss, by the functions of a framework."""
    chosen = {"adv_estimator": "grpo", "loss_agg_mode": "token-mean", "kl_loss_type": "low_var_kl"}
    chosen |= settings
    tensors = {name: torch.tensor(array) for name, array in arrays.items()}
    mask, rows = tensors["response_mask"].float(), len(arrays["scores"])
    rewards = torch.zeros_like(mask)
    rewards[torch.arange(rows), tensors["response_lengths"] - 1] = tensors["scores"]
    if factor := chosen.get("overlong"):  # verl/workers/reward_manager/dapo.py
        exceeding = (tensors["response_lengths"] - (mask.shape[1] - 3)).clamp(min=0)
        rewards[torch.arange(rows), tensors["response_lengths"] - 1] -= exceeding / 3 * factor
    if coefficient := chosen.get("kl_in_reward"):
        pair = tensors["old_log_probs"], tensors["ref_log_prob"]
        rewards -= coefficient * penalized(system, *pair, "low_var_kl") * mask
    inputs = {"token_level_rewards": rewards, "response_mask": mask, "index": arrays["group"]}
    inputs |= {"values": tensors["values"], "gamma": 1.0, "lam": 1.0}
    inputs |= {n: chosen[n] for n in ("gamma", "lam", "norm_adv_by_std_in_grpo") if n in chosen}
    advantages = estimated(system, str(chosen["adv_estimator"]), inputs)
    parts = np.array_split(np.arange(rows), rows // chosen.get("micro_batch", rows))
    losses, kls = [], []
    for part in parts:
        names = ("old_log_probs", "log_probs", "ref_log_prob")
        old, new, ref = (tensors[name][part] for name in names)
        loss, kl = lossed(system, old, new, ref, advantages[part], mask[part], chosen)
        losses.append(float(loss))
        kls.append(float(kl))
    pg_loss, kl_loss = float(np.mean(losses)), float(np.mean(kls))
    arrays = arrays | {"advantages": advantages, "token_level_rewards": rewards}
    if chosen["adv_estimator"] != "gae":
        del arrays["values"]
    numbers = {"pg_loss": pg_loss, "loss": pg_loss + 0.1 * kl_loss, "lr": 1e-3}
    return {"arrays": arrays, **numbers}


def estimated(system: str, name: str, inputs: dict[str, Any]) -> torch.Tensor:
    import inspect

    if system == "verl":
        from verl.trainer.config import AlgoConfig
        from verl.trainer.ppo import core_algos

        estimator = core_algos.get_adv_estimator_fn(name)
        inputs = inputs | {"config": AlgoConfig(gamma=inputs["gamma"], lam=inputs["lam"])}
    else:
        estimator = ADVANTAGE_ESTIMATORS.look_up(name)
    taken = inspect.signature(estimator).parameters
    advantages: torch.Tensor = estimator(**{n: x for n, x in inputs.items() if n in taken})[0]
    return advantages


def penalized(system: str, policy: Any, reference: Any, kind: str) -> Any:
    """Return a framework's estimate of the KL."""
    if system == "verl":
        from verl.trainer.ppo import core_algos

        return core_algos.kl_penalty(policy, reference, kind)
    return kl_penalty(policy, reference, kind)


def lossed(
    system: str, old: Any, new: Any, ref: Any, advantages: Any, mask: Any, chosen: Mapping[str, Any]
) -> tuple[Any, Any]:
    """Return the policy loss and the KL of some rows."""
    clips = {n: chosen.get(n, 0.2) for n in ("clip_ratio", "clip_ratio_low", "clip_ratio_high")}
    clips["clip_ratio_c"] = chosen.get("clip_ratio_c", 3.0)
    mode, kind = chosen["loss_agg_mode"], chosen["kl_loss_type"]
    name = chosen.get("policy_loss", "vanilla")
    if system == "verl":
        from verl.trainer.ppo import core_algos
        from verl.workers.config import ActorConfig as VerlActorConfig

        config = VerlActorConfig(strategy="fsdp", rollout_n=4, use_dynamic_bsz=True, **clips)
        function = core_algos.get_policy_loss_fn(name)
        loss, _ = function(old, new, advantages, mask, mode, config)
        return loss, core_algos.agg_loss(penalized(system, new, ref, kind), mask, mode)
    ours = ActorConfig()
    for key, value in clips.items():
        setattr(ours, key, value)
    loss, _ = get_policy_loss(name)(old, new, advantages, mask.bool(), mode, config=ours)
    return loss, agg_loss(penalized(system, new, ref, kind), mask, mode)


class Outcome(NamedTuple):
    pair: Pair
    stage: str
    """The stage that bisect named; empty if it found no difference."""
    causes: str

    @property
    def stage_is_right(self) -> bool:
        return self.stage == self.pair.stage

    @property
    def cause_is_right(self) -> bool:
        return self.stage_is_right and self.pair.cause in self.causes


def outcome(sides: Sides, pair: Pair) -> Outcome:
    """Run `bisect` on a pair."""
    with contextlib.redirect_stdout(io.StringIO()):
        finding = bisect(*sides.of(pair))
    return Outcome(pair, finding.stage, str(finding.causes))


def main(systems: Sequence[str]) -> None:
    counts: dict[str, list[int]] = {"first stage": [0, 0], "cause": [0, 0], "none": [0, 0]}
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(Path(folder))
        for pair in PAIRS:
            if systems and pair.system.split()[0] not in systems:
                continue
            result = outcome(sides, pair)
            if pair.stage:
                checks = {"first stage": result.stage_is_right, "cause": result.cause_is_right}
            else:
                checks = {"none": not result.stage}
            for name, is_right in checks.items():
                counts[name][0] += is_right
                counts[name][1] += 1
            words = ", ".join(f"{name} {'right' if x else 'WRONG'}" for name, x in checks.items())
            wrong = "" if all(checks.values()) else f" ({result.stage}: {result.causes[:300]})"
            print(f"{pair.system} {dict(pair.changes)}: {words}{wrong}", flush=True)
    for name, (right, total) in counts.items():
        print(f"{name}: {right} of {total}")


if __name__ == "__main__":
    main(sys.argv[1:])
