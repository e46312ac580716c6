"""Plan PPO's roles on GPUs: their calls, and the layouts of engines that generate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import product
from typing import ClassVar

from trainer.config.devices import run_devices
from trainer.memory import model_memory
from trainer.ppo.config import PPOConfig
from trainer.ppo.memory import (
    call_size,
    call_sizes,
    check_memory,
    engine_may_sleep,
    largest_pass,
    role_memories,
)
from trainer.ppo.roles import declared_models
from trainer.tools.planner.cost import Gpus, StepRows, decode_seconds, sync_seconds
from trainer.tools.planner.job import Job, Keys
from trainer.tools.planner.records import record_tokens, sampler_seconds
from trainer.tools.planner.search import RoleLayout, Seconds
from verl_like.placement.pools import expand_roles
from workers.config import is_actors_module, model_rewards
from workers.memory import RoleMemory, hf_config_of, rollout_memory
from workers.models.attention import heads_of, layer_configs
from workers.models.pass_trace import NOT_TRACED
from workers.training.role_model_spec import RoleModelSpec

ROLLOUT = "actor_rollout_ref.rollout"
ENGINE_SIZES = (1, 2, 4, 8)
SAMPLING = ("temperature", "top_k", "top_p", "do_sample")
UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""Fractions of a GPU's memory to try for an engine."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PPOJob(Job):
    """A PPO run, and the lengths of its samples."""

    stages: ClassVar[tuple[str, ...]] = ("sample", "score", "update", "sync")
    config: PPOConfig
    mean_prompt: float
    responses: Sequence[float]
    """Lengths of responses that are equally likely, the longest last."""
    waits: float = 0.0
    """Seconds that a sample waits for its environment."""
    rewards: float = 0.0
    """Seconds per step in which the driver scores."""

    @property
    def describe_rows(self) -> str:
        """Prompts, samples and lengths in words."""
        data, rows = self.config.data, self.rows("actor")
        per_prompt = rows.samples // rows.prompts
        return (
            f"{data.train_batch_size:,} prompts x {per_prompt} "
            f"sample{'s' * (per_prompt > 1)}, prompt + response of {rows.prompt:g} + "
            f"{rows.mean_response:g} tokens on average (at most {data.max_prompt_length:,} + "
            f"{data.max_response_length:,}); mini-batches of "
            f"{self.config.actor_rollout_ref.actor.ppo_mini_batch_size:,} prompts"
        )

    @property
    def least(self) -> tuple[float, ...]:
        """Seconds of the driver's own work per stage, which runs in parallel with the roles."""
        return tuple(self.rewards * (stage == "score") for stage in self.stages)

    def models_in(self, config: PPOConfig) -> dict[str, RoleModelSpec]:
        """Return the model of every role that has one."""
        return declared_models(config, without_users=True)

    @functools.cached_property
    def roles(self) -> list[str]:
        """Roles that use GPUs."""
        roles = expand_roles(self.config.role_mapping)
        return [r for r in roles if r in self.models or self.config.kind_of(r) == "rollout"]

    def rows(self, role: str) -> StepRows:
        """Return the samples of a call of the role."""
        config, model = self.config, self.models.get(role)
        prompts = config.data.train_batch_size
        samples = prompts * config.actor_rollout_ref.rollout.n
        mini_batch = model.mini_batch if model is not None else None
        return StepRows(
            samples=samples,
            prompts=prompts,
            prompt=self.mean_prompt,
            responses=self.responses,
            longest=config.data.max_prompt_length + config.data.max_response_length,
            waits=self.waits,
            mini_batches=-(-samples // (mini_batch or samples)),
            epochs=1 if model is None else model.epochs,
        )

    def pass_tokens(self, config: PPOConfig, model: RoleModelSpec, role: str, method: str) -> int:
        """Return the tokens of a pass of this call; a pass of samples has its mean tokens."""
        rows = self.rows(role)
        size = call_size(config, model, role, method, rows.samples)
        if size.pass_samples is not None:
            return round(size.pass_samples * rows.tokens)
        return size.pass_tokens

    def smaller_passes(self, role: str) -> list[Keys]:
        """Return keys that make the passes of a trained model smaller, to try."""
        if not self.config.actor_rollout_ref.actor.use_dynamic_bsz:
            return []
        section = "critic" if role == "critic" else "actor_rollout_ref.actor"
        now = self.pass_tokens(self.config, self.models[role], role, "update_")
        width = self.rows(role).longest
        sizes = {max(width, now // 4), width} - {now}
        return [{f"{section}.ppo_max_token_len_per_gpu": size} for size in sizes]

    def role_memory(self, config: PPOConfig, role: str, model: RoleModelSpec) -> RoleMemory:
        """Return the memory of the role in this run, as the run computes it."""
        largest = largest_pass(config, role, call_sizes(config, self.nodes))
        return model_memory(config, role, model, "cuda", largest)

    def memories(self, config: PPOConfig) -> list[RoleMemory]:
        """Return the memory of all roles in this run, as the run computes it."""
        return role_memories(config, "cuda", self.device.bytes)

    def check_run(self, config: PPOConfig) -> None:
        """Raise if the roles do not fit; other checks run while the keys are composed."""
        check_memory(config, run_devices(config.trainer))

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def layouts(self, role: str, num_gpus: int) -> list[RoleLayout]:
        """Return the layouts to try of a model, or of engines, on this number of GPUs."""
        if self.config.kind_of(role) == "rollout":
            gpus = Gpus(self.device, num_gpus, self.per_node)
            return list(self.engines(role, gpus, self.rows(role)))
        candidates = super().layouts(role, num_gpus)
        if role in model_rewards(self.config) and engine_may_sleep(self.config, "cuda"):
            # reward models may score while an engine on the same GPUs is awake
            awake = [replace(layout.memory, beside_engine=True) for layout in candidates]
            return [replace(layout, memory=m) for layout, m in zip(candidates, awake, strict=True)]
        return candidates

    def sharing(
        self, roles: tuple[str, ...], num_gpus: int
    ) -> tuple[list[list[RoleLayout]], Seconds]:
        """Return the layouts of roles that share a pool, and the seconds per stage that it saves.

        A reference that is the actor's module takes no memory. If the engine shares the actor's
        GPUs, a weight sync is faster.
        """
        layouts, saved = super().sharing(roles, num_gpus)
        if {"actor", "ref"} <= {*roles} and is_actors_module(self.config.actor_rollout_ref):
            number = roles.index("ref")
            layouts[number] = [
                replace(layout, memory=RoleMemory("ref", "", layout.memory.types))
                for layout in layouts[number]
            ]
        if {"actor", "rollout"} <= {*roles}:
            gpus, model = Gpus(self.device, num_gpus, self.per_node), self.costs["actor"]
            apart, together = (sync_seconds(model, gpus, is_shared) for is_shared in (False, True))
            saved = (0.0, 0.0, 0.0, apart - together)
        return layouts, saved

    def engines(self, role: str, gpus: Gpus, rows: StepRows) -> Iterator[RoleLayout]:
        """Yield layouts of engines for these rows, by GPUs per engine and fraction of memory."""
        policy = self.config.for_role(role).actor_rollout_ref
        rollout = policy.rollout
        tp_key = f"{ROLLOUT}.tensor_model_parallel_size"
        share_key = f"{ROLLOUT}.gpu_memory_utilization"
        tp_now, share_now = rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization
        is_vllm = rollout.name == "vllm"
        cost, tokens = self.costs["actor"], None
        sampling = {name: getattr(rollout, name) for name in SAMPLING}
        if not is_vllm:
            context = round(rows.prompt + rows.mean_response / 2)
            with suppress(*NOT_TRACED):  # a step of other classes is calculated from bytes
                model = self.models["actor"].model
                tokens = record_tokens(model, context, gpus.device.rates, **sampling)
        sync = sync_seconds(cost, gpus, is_shared=False)
        config = hf_config_of(self.models["actor"].model).get_text_config()
        sampler = sampler_seconds(config.vocab_size, gpus.device.rates, **sampling)
        heads = {heads_of(layer)[:2] for layer in layer_configs(config)}
        for tp, share in product(
            {tp_now, *ENGINE_SIZES} if is_vllm and tp_key not in self.keys else {tp_now},
            {share_now, *UTILIZATIONS} if is_vllm and share_key not in self.keys else {share_now},
        ):
            heads_divide = all(
                queries % tp == 0 and max(groups, tp) % min(groups, tp) == 0
                for queries, groups in heads
            )
            if gpus.count % tp or tp > gpus.per_node or not heads_divide:
                continue
            tried = replace(rollout, tensor_model_parallel_size=tp, gpu_memory_utilization=share)
            engine, num_bytes = replace(policy, rollout=tried), gpus.device.bytes
            memory = rollout_memory(engine, rows.longest, role, "", "cuda", num_bytes, None)
            memory = replace(memory, sleeps=engine_may_sleep(self.config, "cuda"))
            at_once = rollout.max_num_seqs
            seconds = decode_seconds(
                cost, rows, gpus, tp, memory.kv_cache, at_once, sampler, tokens
            )
            if seconds is not None:
                values = {tp_key: (tp, tp_now), share_key: (share, share_now)}
                keys = {key: str(new) for key, (new, old) in values.items() if new != old}
                yield RoleLayout(role, (seconds, 0.0, 0.0, sync), memory, keys)
