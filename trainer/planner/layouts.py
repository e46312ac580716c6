"""The ways to lay a role of PPO's out on so many cards: its keys, seconds and bytes.

A key that the user has set has that value alone.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from trainer.planner.cost import Cards, Model, Rows, decode_seconds, pass_seconds, sync_seconds
from trainer.planner.devices import Device
from trainer.planner.search import Option
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import step_nodes
from trainer.ppo.roles import models_of
from verl_like.errors import ConfigError
from verl_like.placement.roles import expand_roles
from workers.config.model import FrozenFSDPConfig, FSDPConfig, ParallelConfig
from workers.config.passes import tokens_per_pass
from workers.memory import HeldModel, LargestPass, hf_config_of, memory_of, rollout_memory
from workers.parallel.dims import ParallelDims
from workers.parallel.pipeline import num_chunks
from workers.parallel.sharding import dims_of
from workers.training.axes import check_axes

STAGES = ("gen", "score", "update", "update_weights")
"""Of a step, as the dataflow names them; what the driver does alone takes no cards."""
SIZES = (1, 2, 4, 8)
"""Of axes that are tried."""
WORTH_A_KEY = 0.01
"""Seconds that a key must save to be moved off what it is."""
LONG = 8192
"""Tokens of a row below which ranks share rows only where there are fewer of them than ranks."""
TOKENS = "ppo_max_token_len_per_gpu"
UTILIZATIONS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85)
"""Shares of a card's memory that are tried for an engine."""


@dataclass(frozen=True, eq=False)
class Job:
    """What is planned: a configuration, the settings that make it, and the cards."""

    config: PPOConfig
    settings: Sequence[str]
    device: Device
    num_cards: int
    per_node: int
    mean_prompt: float
    responses: Sequence[float]
    """Lengths that are equally likely, the longest last."""
    defaults: Sequence[str] = ()
    """Settings below the user's: those of a run."""
    factors: Mapping[tuple[str, str], float] = field(default_factory=dict)
    """(role, method) -> how many times the predicted seconds its calls have taken."""
    waits: float = 0.0
    """Seconds of a sample's environment."""
    rewards: float = 0.0
    """Seconds in which the driver scores."""

    @property
    def least(self) -> tuple[float, ...]:
        """Seconds of every stage that the driver takes beside the roles."""
        return tuple(self.rewards * (stage == "score") for stage in STAGES)

    @functools.cached_property
    def keys(self) -> set[str]:
        """Those that the user set."""
        return {each.partition("=")[0].lstrip("+") for each in self.settings}

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
            if role in self.roles and node.stage in STAGES:
                found.setdefault(role, []).append((node.stage, method))
        return found

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

    def check(self) -> None:
        """Refuse axes of the user's that a model cannot have."""
        for role, held in self.models.items():
            axes = held.parallel or ParallelConfig()
            self._check_axes(role, ParallelDims(tp=axes.tp, sp=axes.sp, pp=axes.pp))

    def _check_axes(self, role: str, dims: ParallelDims) -> None:
        held = self.models[role]
        check_axes(held.meta_module, held.model, dims, held.axes_key)

    def options(self, role: str, num_cards: int) -> list[Option]:
        """All layouts of the role on so many cards that fit on them when it has them alone."""
        most = self.device.bytes
        return [each for each in self._all(role, num_cards) if each.kept + each.call <= most]

    def least_bytes(self, role: str, num_cards: int) -> float | None:
        """On each of so many cards, whether it fits or not; None where it has no layout on them."""
        return min((each.kept + each.call for each in self._all(role, num_cards)), default=None)

    def _all(self, role: str, num_cards: int) -> Iterator[Option]:
        of_kind = self._engines if self.config.kind_of(role) == "rollout" else self._layouts
        return of_kind(role, Cards(self.device, num_cards, self.per_node))

    def _may(self, key: str, now: Any, others: Collection[Any]) -> list[Any]:
        """The values of a key that are tried: what the user set, or what there is and others."""
        return [now] if key in self.keys else list(dict.fromkeys([now, *others]))

    def _layouts(self, role: str, cards: Cards) -> Iterator[Option]:
        """Of a model that FSDP holds: axes, recomputation, offloading."""
        held, config, rows = self.models[role], self.config, self.rows(role)
        axes, samples = held.parallel or ParallelConfig(), rows.samples
        if not any(stage == "score" for stage, _ in self.calls.get(role, [])):
            samples //= rows.mini_batches
        width = config.data.max_prompt_length + config.data.max_response_length
        most_tokens = held.tokens or tokens_per_pass(config)
        recomputes = held.model.enable_gradient_checkpointing
        offloads = held.sharding.param_offload
        of_axes = held.axes_key
        again_key = f"{held.key.removesuffix('.path')}.enable_gradient_checkpointing"
        offload_key = f"{held.section}.fsdp_config.param_offload"
        tokens_key = f"{role if role == 'critic' else 'actor_rollout_ref.actor'}.{TOKENS}"
        fewer = (max(width, most_tokens // 4), width)
        by_tokens = held.trains and config.actor_rollout_ref.actor.use_dynamic_bsz
        splits = width > LONG or rows.samples // rows.mini_batches < cards.num
        has_axes = held.parallel is not None and not held.quantization
        shards = () if cards.num <= self.per_node or not has_axes else (self.per_node,)
        for num_tokens, shard, tp, sp, again, moved in product(
            self._may(tokens_key, most_tokens, fewer * by_tokens),
            self._may(f"{of_axes}.shard", axes.shard, shards),
            self._may(f"{of_axes}.tp", axes.tp, SIZES * has_axes),
            self._may(f"{of_axes}.sp", axes.sp, SIZES * (has_axes and splits)),
            self._may(again_key, recomputes, (True,) * held.trains),
            self._may(offload_key, offloads, (True,) * held.trains),
        ):
            shard = shard if shard == axes.shard else shard // (tp * sp)  # in one machine
            ranks = tp * sp * axes.pp
            if cards.num % ranks or tp * sp > cards.per_node or cards.num // ranks > samples:
                continue  # of more ranks than samples some would have none
            if not self._can(role, tp, sp):
                continue
            laid = replace(
                held,
                parallel=held.parallel and replace(axes, shard=shard, tp=tp, sp=sp),
                model=replace(held.model, enable_gradient_checkpointing=again),
                fsdp=_offloading(held.fsdp, moved),
            )
            try:
                dims = dims_of(cards.num, laid.sharding)
                at_once = min(num_tokens, -(-samples // dims.data_size) * -(-width // sp))
                reads = round(at_once * config.data.max_response_length / width)
                if held.head == "score":  # a row has one number
                    reads = -(-at_once // width)
                largest = LargestPass(at_once, reads)
                memory = memory_of(laid, role, "pool", cards.num, self.device.type, largest)
            except ConfigError:
                continue
            seconds = dict.fromkeys(STAGES, 0.0)
            for stage, method in self.calls.get(role, []):
                seconds[stage] += self.factors.get((role, method), 1.0) * pass_seconds(
                    self.numbers[role],
                    rows,
                    dims,
                    num_tokens,
                    cards,
                    trains=method.startswith("update_"),
                    recomputes=again,
                    offloads=moved,
                    num_stages=num_chunks(laid.sharding.pp_schedule),
                )
            changed = {
                tokens_key: (num_tokens, most_tokens),
                f"{of_axes}.shard": (shard, axes.shard),
                f"{of_axes}.tp": (tp, axes.tp),
                f"{of_axes}.sp": (sp, axes.sp),
                again_key: (again, recomputes),
                offload_key: (moved, offloads),
                offload_key.replace("param", "optimizer"): (moved, offloads),
            }
            keys = {key: str(new).lower() for key, (new, old) in changed.items() if new != old}
            seconds["update" if held.trains else "score"] += len(keys) * WORTH_A_KEY
            yield Option(role, tuple(seconds.values()), memory.kept, memory.call, keys)

    def _engines(self, role: str, cards: Cards) -> Iterator[Option]:
        """Of engines that generate: cards of each, and their share of the memory."""
        config, policy = self.config, self.config.of_role(role).actor_rollout_ref
        rollout, model, rows = policy.rollout, self.numbers["actor"], self.rows(role)
        width = config.data.max_prompt_length + config.data.max_response_length
        key = "actor_rollout_ref.rollout"
        tp_now, share_now = rollout.tensor_model_parallel_size, rollout.gpu_memory_utilization
        is_vllm = rollout.name == "vllm"
        apart = sync_seconds(model, cards, is_shared=False)
        saves = (0.0, 0.0, 0.0, apart - sync_seconds(model, cards, is_shared=True))
        for tp, share in product(
            self._may(f"{key}.tensor_model_parallel_size", tp_now, SIZES * is_vllm),
            self._may(f"{key}.gpu_memory_utilization", share_now, UTILIZATIONS * is_vllm),
        ):
            if cards.num % tp or tp > cards.per_node or not self._heads_divide(tp):
                continue
            tried = replace(rollout, tensor_model_parallel_size=tp, gpu_memory_utilization=share)
            as_tried = replace(policy, rollout=tried)
            memory = rollout_memory(
                as_tried,
                width,
                role,
                "pool",
                self.device.type,
                self.device.bytes,
                ranks_of_actor=None,
            )
            at_once = rollout.max_num_seqs
            seconds = decode_seconds(model, rows, cards, tp, memory.kv_cache, at_once)
            if seconds is None:
                continue
            seconds *= self.factors.get((role, "generate_sequences"), 1.0)
            changed = {
                f"{key}.tensor_model_parallel_size": (tp, tp_now),
                f"{key}.gpu_memory_utilization": (share, share_now),
            }
            keys = {key: str(new) for key, (new, old) in changed.items() if new != old}
            own = (seconds, 0.0, 0.0, apart)
            yield Option(role, own, memory.kept, memory.call, keys, "actor", saves)

    @functools.cached_property
    def numbers(self) -> dict[str, Model]:
        """Role -> what its times depend on."""
        return {role: Model.of(held) for role, held in self.models.items()}

    @functools.cache  # noqa: B019 - a job lives as long as its plan
    def _can(self, role: str, tp: int, sp: int) -> bool:
        """Whether the role's model can be laid over these axes."""
        try:
            self._check_axes(role, ParallelDims(tp=tp, sp=sp))
        except ConfigError:
            return False
        return True

    def _heads_divide(self, size: int) -> bool:
        config = hf_config_of(self.models["actor"].model).get_text_config()
        heads: int = config.num_attention_heads
        groups: int = getattr(config, "num_key_value_heads", None) or heads
        return heads % size == 0 and max(groups, size) % min(groups, size) == 0


def _offloading(fsdp: FrozenFSDPConfig, moved: bool) -> FrozenFSDPConfig:
    if isinstance(fsdp, FSDPConfig):
        return replace(fsdp, param_offload=moved, optimizer_offload=moved)
    return replace(fsdp, param_offload=moved)
