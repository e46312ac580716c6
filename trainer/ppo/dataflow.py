"""The calls of a PPO step: their order, and which can overlap.

The step runs on stubs (`trainer.stubs`).
`tests/trainer/ppo/test_dataflow_recorded.py` compares the nodes with the calls of real runs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import groupby
from typing import Any

import torch

from trainer.data.lm_rows import STUB_ROW, lm_batch
from trainer.data.loader import RowLoader
from trainer.ppo import scoring
from trainer.ppo.config import PPOConfig
from trainer.ppo.roles import recipe_workers
from trainer.rollouts.samples import EXTRA
from trainer.stubs import NUM_TOKENS, CallNode, StubFuture, StubGroups, columns_in, stub_columns
from verl_like.batch.protocol import DataProto
from verl_like.batch.ragged import RaggedTensor
from verl_like.terminal import draw_table
from workers.columns import sample_scores
from workers.config import model_rewards, reward_configs

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


class StubTokenizer:
    """The tokenizer of a step on stubs, which decodes nothing."""

    pad_token_id = 0


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
        self._rewards, self._groups = reward_configs(config), groups
        algorithm = config.algorithm
        self._names = [algorithm.filter_groups.metric, *algorithm.gdpo_reward_keys]

    def launch(self, batch: DataProto, call_model: Callable[..., Any], *_: Any) -> StubFuture:
        """Return a future of scores, which waits for reward models."""
        of_models = [call_model(reward) for reward in self._rewards if reward.kind == "model"]
        scores = stub_columns(["token_level_scores", "step_ends"], batch)
        numbers = sample_scores(scores).double().numpy()
        scores.non_tensor_batch |= {EXTRA + name: numbers for name in self._names}
        is_computed = len(of_models) < len(self._rewards)
        number = self._groups.launch("rewards", columns_in(scores)) if is_computed else -1
        return StubFuture(self._groups, number, (scores, {}), of_models)


def stub_inputs(cls: type, config: PPOConfig, groups: StubGroups) -> tuple[Any, ...]:
    """Return the inputs of the trainer in a step on stubs."""
    ptx = None
    if config.ptx.train_files:
        make_batch = partial(lm_batch, pad_token_id=StubTokenizer.pad_token_id)
        ptx = RowLoader([STUB_ROW], config.trainer.seed, make_batch)
    return StubTokenizer(), StubPrompts(config, groups), StubRewards(config, groups), ptx


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


def calls_of_own_roles(config: PPOConfig, nodes: Sequence[CallNode]) -> list[str]:
    """Return a line with the calls of roles that the recipe does not have, if there are any."""
    own = {role for role in config.role_workers if config.kind_of(role) not in recipe_workers()}
    own -= model_rewards(config).keys()
    calls = [f"{node.name} in {node.stage}" for node in nodes if own & {*node.roles}]
    return [f"Calls of your roles: {', '.join(calls)}"] if calls else []


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
