"""The calls of a step, recorded by running the step on stubs: their order, and which can overlap.

`trace_step(config, trainer_cls)` runs the `step` of the class on groups that compute nothing
(`trainer.stubs`), with a tiny batch. So an overridden stage shows the calls that it really makes.
`tests/trainer/ppo/test_dataflow_recorded.py` compares the nodes with the calls of real runs.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import torch

from trainer.launch import trainer_class
from trainer.ppo import scoring
from trainer.ppo.config import PPOConfig
from trainer.rollouts.samples import EXTRA
from trainer.run_state import Run
from trainer.stubs import DRIVER, INLINE, NUM_TOKENS, StubFuture, StubGroups, columns_in, made_up
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.config_key import changed
from verl_like.placement.roles import expand_roles
from verl_like.terminal import draw_table
from workers.columns import sample_scores
from workers.config import rewards_of

REUSE_NOTICE = (
    "note: samples of the current weights need no separate pass for old log-probs: an update is "
    "one on-policy optimizer step, and its forward pass computes them"
)

STEP_1_NOTICE = (
    "note: step 1 still computes old log-probs, to measure the rounding error of the int8 "
    "reference before the actor changes"
)

BYPASS_NOTICE = (
    "note: bypass_mode uses the rollout's log-probs as old log-probs, so the actor computes none"
)

PROBLEM_NOTICE = (
    "note: further calls are not known, because the step failed on stubs, which return only the "
    "columns that workers declare (@batch_columns): {}"
)
WAITS = "Each call also waits for the stages before it, unless `only` precedes its waits."
IN_BACKGROUND = ("ping", "open_delivery", "deliver_weights", "receive_weights")
"""Calls of generators that belong to no stage."""


@dataclass(frozen=True)
class CallNode:
    """A call of a step, or a computation of the driver."""

    stage: str
    name: str
    roles: tuple[str, ...]
    """The role, or the same role of several generators; none for the driver."""
    pool: str
    place: str
    """The pool, or the driver's process: one call at a time runs there."""
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    after: frozenset[tuple[str, str]]
    """Stage and name of the nodes that had ended when the driver launched this one."""

    @property
    def key(self) -> tuple[str, str]:
        """Stage and name."""
        return self.stage, self.name


class StubPrompts:
    """Prompts of a step on stubs, instead of a `PromptLoader`."""

    epoch, total_steps, has_images, validation = 0, 1, False, None

    def __init__(self, config: PPOConfig, groups: StubGroups) -> None:
        self._data, self._groups = config.data, groups

    def __iter__(self) -> Iterator[DataProto]:
        while True:
            yield self.batch(0)

    def num_prompts(self, number: int) -> int:
        """Return the number of prompts in a batch."""
        return self._data.train_batch_size

    def batch(self, number: int) -> DataProto:
        """Return the prompts of a batch."""
        size, width = self._data.train_batch_size, self._data.max_prompt_length
        tokens = [torch.arange(NUM_TOKENS)] * size
        ids = RaggedTensor.from_rows(tokens, width, at_end=True, fill=0)
        mask = ids.with_values(torch.ones_like(ids.values))
        tensors = {"input_ids": ids, "attention_mask": mask, "position_ids": ids}
        objects = {
            "uid": [f"{number}-{row}" for row in range(size)],
            "raw_prompt": [[{"role": "user", "content": ""}]] * size,
            "data_source": [""] * size,
            "reward_model": [{"ground_truth": ""}] * size,
            "extra_info": [{}] * size,
        }
        self._groups.compute("prompts", [*tensors, *objects])
        return DataProto.from_dict(tensors, objects, {"pad_token_id": 0, "eos_token_id": 0})


class StubRewards:
    """Rewards of a step on stubs, instead of `Rewards`; numbers that keys name are there, too."""

    def __init__(self, config: PPOConfig, groups: StubGroups) -> None:
        self._rewards, self._groups = rewards_of(config), groups
        algorithm = config.algorithm
        self._names = [algorithm.filter_groups.metric, *algorithm.gdpo_reward_keys]

    def launch(self, batch: DataProto, call_model: Callable[..., Any], *_: Any) -> StubFuture:
        """Return a future of scores, which waits for reward models."""
        of_models = [call_model(reward) for reward in self._rewards if reward.kind == "model"]
        scores = made_up(["token_level_scores", "step_ends"], batch)
        numbers = sample_scores(scores).double().numpy()
        scores.non_tensor_batch |= {EXTRA + name: numbers for name in self._names}
        is_computed = len(of_models) < len(self._rewards)
        number = self._groups.launch("rewards", columns_in(scores)) if is_computed else -1
        return StubFuture(self._groups, number, (scores, {}), of_models)


class DriverWork:
    """Observes a step on stubs, and records what the driver computes between the calls."""

    def __init__(self, groups: StubGroups) -> None:
        self._groups = groups
        self._before: Sequence[str] | None = None

    def on_stage_begin(self, trainer: Any, stage: str, batch: DataProto | None) -> None:
        """Store the names of the columns that a stage gets."""
        self._before = None if batch is None else tuple(columns_in(batch))

    def on_stage_end(self, trainer: Any, stage: str, result: Any) -> None:
        """Record the columns that a stage without calls adds."""
        if self._before is not None and not self._groups.new_calls:
            written = [name for name in columns_in(result[0]) if name not in self._before]
            self._groups.compute(", ".join(written), written)

    def on_filter(self, trainer: Any, name: str, before: DataProto, after: DataProto) -> None:
        """Record a filter that changes the batch."""
        if after is not before:
            self._groups.compute(name, ())


def our_class(trainer_cls: type) -> type:
    """Return the recipe's own class from which a user's class derives."""
    return next(cls for cls in trainer_cls.__mro__ if cls.__module__.startswith("trainer."))


def trace_step(config: PPOConfig, trainer_cls: type | None = None) -> tuple[list[CallNode], str]:
    """Return the calls of a step in the order of their launch, and why the list ends early, or "".

    The class is by default `trainer.cls`. If the run has several generators, a node stands for the
    roles of all of them.
    """
    cls, problem = trainer_cls or trainer_class(config), ""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as at_end:
        at_end.callback(setattr, sys, "breakpointhook", sys.breakpointhook)
        sys.breakpointhook = lambda *_, **__: None  # the numbers are made up
        small = _small(config, folder)
        groups = StubGroups(small, config.is_inline)
        run: Any = Run(small, groups, observers=[DriverWork(groups)])  # type: ignore[arg-type]
        every = config.actor_rollout_ref.ref.update_every or 1
        run.step = (config.trainer.critic_warmup // every + 1) * every
        tokenizer, prompts = SimpleNamespace(pad_token_id=0), StubPrompts(small, groups)
        ptx = SimpleNamespace(take=prompts.batch) if config.ptx.train_files else None
        try:
            trainer = cls(run, tokenizer, prompts, StubRewards(config, groups), ptx)
            if config.generates_while_training:
                at_end.callback(trainer.buffer.close)  # ends the generators' threads
                trainer.weights.version += small.async_training.max_staleness
            with trainer.clock("step"):
                trainer.step()
        except Exception as error:  # noqa: BLE001 - whatever a user's step raises on stubs
            problem = f"{type(error).__name__}: {error}"
    return _nodes(config, run.calls), problem


def _small(config: PPOConfig, folder: str) -> Any:
    """Return the configuration with as few prompts as its mini-batches allow, and this folder."""
    actor, critic = "actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"
    sizes = {"data.train_batch_size": config.data.train_batch_size}
    sizes[actor] = config.actor_rollout_ref.actor.ppo_mini_batch_size
    if config.critic.ppo_mini_batch_size:
        sizes[critic] = config.critic.ppo_mini_batch_size
    # each generator of an asynchronous run needs its share of the prompts
    scale = 1 if config.generates_while_training else math.gcd(*sizes.values())
    changes: dict[str, Any] = {key: size // scale for key, size in sizes.items()}
    changes |= {"trainer.default_local_dir": folder, "trainer.resume_mode": "disable"}
    return changed(config, changes | {"trainer.backend": "local"})


def _nodes(config: PPOConfig, calls: Sequence[dict[str, Any]]) -> list[CallNode]:
    """Return a node for all calls of a method in a stage."""
    keys: dict[int, tuple[str, str]] = {}
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for call in calls:
        role, method = config.kind_of(call["role"]), call["method"]
        if not (config.generates_while_training and method in IN_BACKGROUND):
            keys[call["number"]] = key = call["stage"], f"{role}.{method}" if role else method
            first.setdefault(key, call)
    pools, nodes = expand_roles(config.role_mapping), []
    for key, call in first.items():
        kind = config.kind_of(call["role"])
        roles = tuple(role for role in pools if config.kind_of(role) == kind)
        used = ", ".join(dict.fromkeys(pools[role] for role in roles)) or DRIVER
        place = INLINE if call["is_inline"] else used
        after = frozenset(keys[number] for number in call["ended"] if number in keys) - {key}
        nodes.append(CallNode(*key, roles, used, place, call["reads"], call["writes"], after))
    return nodes


def overlaps(nodes: Sequence[CallNode]) -> list[str]:
    """Return a line for each stage in which calls at several places run at the same time."""
    lines = []
    for stage, group in groupby(nodes, lambda node: node.stage):
        together, chains = list(group), defaultdict[str, list[str]](list)
        for node in together:
            if any(
                node.place != other.place
                and node.key not in other.after
                and other.key not in node.after
                for other in together
            ):
                chains[node.place].append(node.name)
        texts = [", then ".join(chain) for chain in chains.values()]
        bound = [f"({text})" if ", then " in text else text for text in texts]
        if bound:
            lines.append(f"Concurrent in {stage}: {' ‖ '.join(bound)}")
    return lines


def describe(config: PPOConfig, nodes: Sequence[CallNode], problem: str = "") -> str:
    """Describe the result of `trace_step`: what each call waits for, and which ones overlap.

    The table leaves out waits that follow from others: a call waits for the stages before it,
    except after the word `only`, and for everything that the calls in its row wait for.
    """
    rows, stages = (
        [("stage", "call", "pool", "waits for")],
        list(dict.fromkeys(n.stage for n in nodes)),
    )
    for node in nodes:
        earlier = stages[: stages.index(node.stage)]
        waits_for_stages = all(other.key in node.after for other in nodes if other.stage in earlier)
        before = [other for other in nodes if other.key in node.after]
        last = [n for n in before if not any(n.key in other.after for other in before)]
        names = [n.name for n in last if not (waits_for_stages and n.stage in earlier)]
        only = "" if waits_for_stages else "only "
        rows.append((node.stage, node.name, node.pool, f"{only}{', '.join(names)}" or "-"))
    lines = [*draw_table(rows, num_titles=2), WAITS, *overlaps(nodes)]
    if scoring.update_can_compute_old_log_probs(config):
        lines.append(REUSE_NOTICE)
        if scoring.measures_reference(config, step=1):
            lines.append(STEP_1_NOTICE)
    if config.algorithm.rollout_correction.bypass_mode:
        lines.append(BYPASS_NOTICE)
    if problem:
        lines.append(PROBLEM_NOTICE.format(problem))
    return "\n".join(lines)
