"""The start of a run: what can be refused is refused, then processes start.

`trainer.main_ppo` and tests call `run`.
"""

from __future__ import annotations

import os
import sys
from contextlib import closing

import torch

from trainer.data.prompts import PromptLoader, load_tokenizer
from trainer.data.sizes import batch_table
from trainer.groups.worker_groups import WorkerGroups
from trainer.ppo.config import PPOConfig
from trainer.ppo.dataflow import describe
from trainer.ppo.step import PPOTrainer
from trainer.preflight import preflight
from trainer.report.page import close_run
from trainer.run_folder.checkpoint import Checkpoints
from trainer.run_folder.folder import open_run_folder
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from verl_like.placement.plan import Placement
from verl_like.placement.pools import Node
from verl_like.registry import load_object
from verl_like.terminal import fit, terminal_width
from workers.cpu.allocator import keep_freed_memory
from workers.rewards.manager import make_reward_manager


def run(config: PPOConfig, trainer_cls: type[PPOTrainer] | None = None) -> None:
    """A whole run: checks first, then data, then processes, then steps.

    With `trainer.dry_run` it ends before them.
    """
    torch.set_num_threads(
        1
    )  # sums come out alike whatever the machine; the driver's share of the arithmetic is small
    keep_freed_memory()
    os.environ.setdefault(
        "HF_HUB_DISABLE_PROGRESS_BARS", "1"
    )  # one bar a weight file and rank, on top of our own
    trainer_cls = trainer_cls or trainer_class(config)
    if config.trainer.dry_run:
        show_plan(nominal_placement(config), config)
        return
    preflight(config)
    Checkpoints(
        config
    )  # a folder that this run cannot go on from is refused before any process starts
    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    loader = PromptLoader(config, tokenizer)
    with closing(
        make_reward_manager(
            config.custom_reward_function, config.reward_model, tokenizer, loader.data_sources
        )
    ) as rewards:
        folder = open_run_folder(config)
        try:
            with WorkerGroups(config) as groups:
                write_whole(folder / "placement.txt", f"{groups.placement}\n")
                show_plan(groups.placement, config)
                trainer_cls(config, groups, tokenizer, loader, rewards).fit()
        finally:
            close_run(folder, sys.exception())


def show_plan(placement: Placement, config: PPOConfig) -> None:
    """Print who runs where, how much and in which order, as wide as the terminal."""
    width = terminal_width()
    parts = placement.draw(width), batch_table(config, width), describe(config, width)
    print(*(fit(part, width) for part in parts), sep="\n\n", flush=True)


def nominal_placement(config: PPOConfig) -> Placement:
    """The plan on the machines that the configuration names, without looking for them."""
    trainer = config.trainer
    cpus = float(os.cpu_count() or 1)
    nodes = [
        Node(f"node {number}", trainer.n_gpus_per_node, cpus, "device")
        for number in range(trainer.nnodes)
    ]
    return Placement.plan(
        config.resource_pool_spec, config.role_mapping, nodes, config.cpus_per_process
    )


def trainer_class(config: PPOConfig) -> type[PPOTrainer]:
    """The class at `trainer.cls`."""
    cls = load_object(config.trainer.cls, "trainer.cls")
    if not (isinstance(cls, type) and issubclass(cls, PPOTrainer)):
        raise ConfigError(
            f"trainer.cls={config.trainer.cls} is not a subclass of trainer.PPOTrainer."
        )
    return cls
