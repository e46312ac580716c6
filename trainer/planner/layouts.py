"""PPO's roles on cards: how their passes are cut, and the ways to lay out engines that generate."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, ClassVar

from trainer.config.devices import devices_of
from trainer.config.recipe import Recipe
from trainer.planner.cost import Cards, Rows, decode_seconds, sync_seconds
from trainer.planner.job import SIZES, Job, Passes
from trainer.planner.search import Option
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import step_nodes
from trainer.ppo.memory import check_memory, may_rest, role_memories
from trainer.ppo.recipe import PPO
from trainer.ppo.roles import models_of
from verl_like.placement.roles import expand_roles
from workers.config import ActorRolloutRefConfig, model_rewards
from workers.config.passes import tokens_per_pass
from workers.memory import HeldModel, RoleMemory, hf_config_of, rollout_memory

TOKENS = "ppo_max_token_len_per_gpu"
GENERATION = "generate_sequences"
UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""Shares of a card's memory that are tried for an engine."""


@dataclass(frozen=True, eq=False, kw_only=True)
class PPOJob(Job):
    """A run of PPO, and how long its samples are."""

    recipe: ClassVar[Recipe[Any]] = PPO
    stages: ClassVar[tuple[str, ...]] = ("gen", "score", "update", "update_weights")
    """As the dataflow names them; what the driver does alone takes no cards."""
    model_key: ClassVar[str] = "actor_rollout_ref.model"
    config: PPOConfig
    mean_prompt: float
    responses: Sequence[float]
    """Lengths that are equally likely, the longest last."""
    waits: float = 0.0
    """Seconds of a sample's environment."""
    rewards: float = 0.0
    """Seconds in which the driver scores."""

    @property
    def rows_in_words(self) -> str:
        """Prompts, samples, lengths."""
        data, rows = self.config.data, self.rows("actor")
        return (
            f"{data.train_batch_size:,} prompts a step, {rows.samples // rows.prompts} of each, "
            f"{rows.prompt:g} + {rows.mean_response:g} tokens "
            f"(at most {data.max_prompt_length:,} + {data.max_response_length:,})"
        )

    @property
    def least(self) -> tuple[float, ...]:
        """Seconds of every stage that the driver takes beside the roles."""
        return tuple(self.rewards * (stage == "score") for stage in self.stages)

    @functools.cached_property
    def models(self) -> dict[str, HeldModel]:
        """Role -> its model, of all that hold one."""
        return models_of(self.config, without_users=True)

    @functools.cached_property
    def roles(self) -> list[str]:
        """Those that take cards."""
        roles = expand_roles(self.config.role_mapping)
        return [r for r in roles if r in self.models or self.config.kind_of(r) == "rollout"]

    @functools.cached_property
    def calls(self) -> dict[str, list[tuple[str, str]]]:
        """Role -> (stage, method) of its calls in a step."""
        found: dict[str, list[tuple[str, str]]] = {}
        for node in step_nodes(self.config):
            role, _, method = node.name.partition(".")
            if role in self.roles and node.stage in self.stages:
                found.setdefault(role, []).append((node.stage, method))
        return found

    def memories(self, config: PPOConfig) -> list[RoleMemory]:
        """As a run counts them."""
        devices = devices_of(config.trainer)
        return role_memories(config, devices.type, devices.bytes)

    def check_run(self, config: PPOConfig) -> None:
        """By memory; the rest is checked as it is composed."""
        check_memory(config, devices_of(config.trainer))

    def rows(self, role: str) -> Rows:
        """The samples of a call of the role."""
        config, actor = self.config, self.config.actor_rollout_ref.actor
        prompts = config.data.train_batch_size
        mini, epochs = actor.ppo_mini_batch_size, actor.ppo_epochs
        if role == "critic":
            mini = config.critic.ppo_mini_batch_size or mini
            epochs = config.critic.ppo_epochs or epochs
        return Rows(
            samples=prompts * config.actor_rollout_ref.rollout.n,
            prompts=prompts,
            prompt=self.mean_prompt,
            responses=self.responses,
            waits=self.waits,
            mini_batches=-(-prompts // mini),
            epochs=epochs,
        )

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def passes(self, role: str) -> Passes:
        """Of samples of full length, several sizes where the optimizer's passes have one key."""
        held, config, rows = self.models[role], self.config, self.rows(role)
        calls = self.calls.get(role, [])
        scores = any(stage == "score" for stage, _ in calls)
        width = config.data.max_prompt_length + config.data.max_response_length
        tokens = held.tokens or tokens_per_pass(config)
        by_tokens = held.trains and config.actor_rollout_ref.actor.use_dynamic_bsz
        fewer = (max(width, tokens // 4), width) if by_tokens else ()
        response = config.data.max_response_length / width
        return Passes(
            calls=calls,
            rows=rows,
            at_once=rows.samples // rows.mini_batches if held.trains else rows.samples,
            read_at_once=rows.samples * (held.trains and scores),
            width=width,
            read_share=1 / width if held.head == "score" else response,
            size_key=f"{role if role == 'critic' else 'actor_rollout_ref.actor'}.{TOKENS}",
            sizes={size: size for size in (tokens, *fewer)},
            model_key=held.key.removesuffix(".path"),
            fsdp_key=f"{held.section}.fsdp_config",
        )

    def layouts(self, role: str, cards: Cards) -> list[Option]:
        """Of a model that is sharded, or of engines."""
        if self.config.kind_of(role) == "rollout":
            return list(self.engines(role, cards, self.rows(role)))
        found = super().layouts(role, cards)
        if role in model_rewards(self.config) and may_rest(self.config, self.device.type):
            # an engine on its cards is awake while it computes, and asleep beside others
            return [replace(each, kept=each.kept + each.call, call=0.0) for each in found]
        return found

    def engines(self, role: str, cards: Cards, rows: Rows) -> Iterator[Option]:
        """Of engines that generate these: cards of each, and their share of the memory."""
        policy = self.config.of_role(role).actor_rollout_ref
        rollout, model = policy.rollout, self.numbers["actor"]
        key = "actor_rollout_ref.rollout"
        tp_now, share_now = rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization
        is_vllm = rollout.name == "vllm"
        apart = sync_seconds(model, cards, is_shared=False)
        saves = (0.0, 0.0, 0.0, apart - sync_seconds(model, cards, is_shared=True))
        for tp, share in product(
            self.may(f"{key}.tensor_model_parallel_size", tp_now, SIZES * is_vllm),
            self.may(f"{key}.gpu_memory_utilization", share_now, UTILIZATIONS * is_vllm),
        ):
            if cards.num % tp or tp > cards.per_node or not self._heads_divide(tp):
                continue
            tried = replace(rollout, tensor_model_parallel_size=tp, gpu_memory_utilization=share)
            seconds, memory = self.decoding(role, replace(policy, rollout=tried), rows, cards)
            if seconds is None:
                continue
            seconds *= self.factors.get((role, GENERATION), 1.0)
            changed = {
                f"{key}.tensor_model_parallel_size": (tp, tp_now),
                f"{key}.gpu_memory_utilization": (share, share_now),
            }
            keys = {key: str(new) for key, (new, old) in changed.items() if new != old}
            own = (seconds, 0.0, 0.0, apart)
            yield Option(role, own, memory.kept, memory.call, keys, "actor", saves)

    def decoding(
        self, role: str, policy: ActorRolloutRefConfig, rows: Rows, cards: Cards
    ) -> tuple[float | None, RoleMemory]:
        """Seconds of generating these by engines of the policy, and what they take of a card; None
        where no row has room."""
        width = self.config.data.max_prompt_length + self.config.data.max_response_length
        device, rollout = cards.device, policy.rollout
        memory = rollout_memory(
            policy, width, role, "pool", device.type, device.bytes, ranks_of_actor=None
        )
        memory = replace(memory, sleeps=may_rest(self.config, device.type))
        tp, at_once = rollout.tensor_model_parallel_size, rollout.max_num_seqs
        model = self.numbers["actor"]
        return decode_seconds(model, rows, cards, tp, memory.kv_cache, at_once), memory

    def _heads_divide(self, size: int) -> bool:
        config = hf_config_of(self.models["actor"].model).get_text_config()
        heads: int = config.num_attention_heads
        groups: int = getattr(config, "num_key_value_heads", None) or heads
        return heads % size == 0 and max(groups, size) % min(groups, size) == 0
