"""PPO as a run sees it: checks, the inputs of the stages, the printed plan, and the metrics shown.

`PPO_RUN` lists what `trainer.launch` and the reports use.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, closing
from typing import Any

from trainer.config.checks import (
    check_axes_of,
    check_checkpoint_of,
    check_passes,
    check_reads_images,
)
from trainer.config.devices import check_offload, run_devices
from trainer.data.files import check_files, is_num_prompts
from trainer.data.prompts import PromptLoader, load_tokenizer
from trainer.groups.worker_groups import worker_class
from trainer.observers.alarms import ALARM_RULES
from trainer.ppo.advantage_inputs import check_columns
from trainer.ppo.config import PPOConfig
from trainer.ppo.config_errors import check_named_rewards, check_players
from trainer.ppo.memory import batch_line, batch_table, check_memory, fit_passes, plan_text
from trainer.ppo.metrics import compute_data_metrics
from trainer.ppo.roles import declared_models, recipe_workers
from trainer.ppo.updating import make_ptx_loader
from trainer.rollouts import preflight
from trainer.rollouts.preflight import reject_wrong_results
from trainer.run_folder.metrics import headline
from trainer.run_state import RunRecipe
from verl_like.errors import ConfigError
from workers.config import critic_optim, has_environment, replays_routing, scores_by_rule
from workers.models.folder import check_same_tokenizer, set_template_variables
from workers.models.memory_shapes import check_adapter, meta_model
from workers.rewards.weighted import make_rewards
from workers.rollout.build_engine import check_notes_routing, resolve_engine


def prepare(config: PPOConfig, at_end: ExitStack) -> tuple[Any, ...]:
    """Check models and files, and return tokenizer, prompts, rewards and PTX rows.

    The cluster starts in the background, because importing transformers takes about as long.
    """
    preflight.check_promptless_rows(config)
    check_files(config.data)
    preflight.check_reward_files(config)
    check_models(config)
    from trainer.groups.cluster import begin_cluster

    begin_cluster(config, at_end)
    # workers inherit this; a progress bar per rank and weight file would hide the run's own output
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    set_template_variables(tokenizer, config.data.apply_chat_template_kwargs)
    kinds = {}
    if has_environment(config):
        from trainer.rollouts import environments

        kinds = environments.check_environment(config, tokenizer)
        check_players(config, kinds.values())
    loader = PromptLoader(config, tokenizer, scores_by_rule(config), config.steps_per_batch)
    if kinds:
        environments.check_row_columns(kinds, loader.prompts.columns)
        environments.note_players(kinds, loader.prompts, loader.validation)
    preflight.note_images(config, loader.prompts, loader.validation)
    preflight.check_images(config, loader.has_images)
    rewards = make_rewards(config, tokenizer, loader)
    at_end.enter_context(closing(rewards))
    reject_wrong_results(rewards, loader.prompts, tokenizer, config.data.max_response_length)
    ptx = make_ptx_loader(config, tokenizer)
    if loader.has_images or (ptx is not None and any(row.images for row in ptx.rows)):
        check_reads_images(declared_models(config))
    check_memory(config, run_devices(config.trainer))
    return tokenizer, loader, rewards, ptx


def worker_code(config: PPOConfig) -> list[str]:
    """Return names or paths of workers' code: roles, loss, optimizers, engines, environments."""
    actor = config.actor_rollout_ref.actor
    code = [*config.role_workers.values(), actor.policy_loss.loss_mode]
    for optim in (actor.optim, critic_optim(config)):
        code += [optim.optimizer, optim.lr_scheduler_type]
    return [*code, *preflight.sampling_code(config)]


def resolve(config: Any) -> Any:
    """Return the configuration with absolute paths of environments, and passes that fit."""
    return fit_passes(preflight.with_full_paths(config), run_devices(config.trainer))


def describe_inputs(config: PPOConfig, *inputs: Any) -> list[str]:
    """Describe prompts and rewards; check that the rewards return the names that keys refer to."""
    from trainer.data.lm_rows import stop_tokens  # only plans import these
    from trainer.ppo.config_warnings import learning_rate_notes
    from trainer.rollouts.first_prompt import first_prompt_lines, repeat_notes
    from trainer.rollouts.reward_trial import try_rewards

    tokenizer, loader, rewards, *_ = inputs
    num_validation = len(loader.validation) if loader.validation else 0
    count = (
        f"prompts to train on: {len(loader.prompts)}, to validate on: {num_validation}; "
        f"steps: {loader.total_steps:,}"
    )
    width, lines = config.data.max_response_length, list[str]()
    if not is_num_prompts(config.data.train_files):
        stop_ids = stop_tokens(tokenizer, config.actor_rollout_ref.model.path)
        lines += first_prompt_lines(loader.prompts, tokenizer, width, stop_ids)
    if not has_environment(config):  # its observations may differ
        lines += repeat_notes(loader.prompts)
    lines += learning_rate_notes(config, loader.total_steps)
    scored, of_rewards = try_rewards(rewards, loader.prompts, tokenizer, width)
    if scored is not None:
        check_named_rewards(config.algorithm, scored)
    return [count, *lines, *of_rewards]


def describe(config: PPOConfig, trainer_cls: type, brief: bool = False) -> list[str]:
    """Describe batch sizes, memory, and the calls of a step of the class.

    A run describes the calls of our class: code of users runs on stubs only in a dry run.
    """
    from trainer.ppo import dataflow  # only plans import it
    from trainer.stubs import our_class, trace_step

    memory = plan_text(config, brief=brief)
    if not config.trainer.dry_run:
        trainer_cls = our_class(trainer_cls)
    nodes, problem = trace_step(config, trainer_cls)
    if brief:
        calls = [*dataflow.overlaps(nodes), *dataflow.calls_of_own_roles(config, nodes)]
        if problem and config.trainer.dry_run:
            calls.append(dataflow.PROBLEM_NOTICE.format(problem))
        return [memory, batch_line(config), "\n".join(calls)]
    return [memory, batch_table(config, nodes), dataflow.describe(config, nodes, problem)]


def stub_inputs(*arguments: Any) -> tuple[Any, ...]:
    """Return the inputs of the trainer in a step on stubs."""
    from trainer.ppo.dataflow import stub_inputs  # only plans import it

    return stub_inputs(*arguments)


def check_models(config: PPOConfig) -> None:
    """Reject models, parallel layouts, engines and quantizations that cannot work in this run."""
    policy, models = config.actor_rollout_ref, declared_models(config)
    for role, model in models.items():
        if model.head == "score":
            continue  # checked by check_reward_models
        preflight.check_model(config, model.key, model.model.path)
        check_axes_of(config, role, model)
        is_ours = config.kind_of(role) in recipe_workers()
        if model.model.path != policy.model.path and (is_ours or not model.trains):
            check_same_tokenizer(model.model.path, policy.model.path, role)
        if model.trains:
            if model.mini_batch is None and is_ours:
                raise ConfigError(
                    f"role_workers.{role}: role_model of {worker_class(config, role).__name__} "
                    "sets no mini_batch, so an update would be one optimizer step. Pass mini_batch "
                    "and epochs, or change the result of super().role_model by dataclasses.replace."
                )
            check_adapter(model.model, model.head)
            check_checkpoint_of(config, role, model)

    # a mini-batch needs at least as many passes as the pipeline has ranks
    trained = {role: model for role, model in models.items() if model.trains}
    has_stages = any(model.sharding.pp > 1 for model in trained.values())
    if has_stages:
        for role, model in trained.items():
            if model.mini_batch is not None:
                section = model.section.removesuffix(".model")
                rows = f"{section}.ppo_mini_batch_size", model.mini_batch
                at_once = None if policy.actor.use_dynamic_bsz else model.trained_rows
                key = f"{section}.ppo_micro_batch_size_per_gpu"
                check_passes(config, role, model, rows, (key, at_once))

    engine = resolve_engine(policy.rollout.name, run_devices(config.trainer).type)
    if "actor" in models and config.trainer.simulate is None:
        actors, width = models["actor"].meta_module.config, config.data.max_prompt_length
        width += config.data.max_response_length
        if engine == "native":
            from workers.rollout.native import module_forward  # slow import: loads transformers

            module_forward.check_model(actors.get_text_config(), width)
            module_forward.check_decoding(actors, width)
        elif engine == "hf":
            from workers.rollout import hf

            hf.check_decoding(actors, width)
        elif engine == "vllm":
            preflight.check_vllm(config, reads_images=False)
    if policy.actor.router_aux_loss_coef > 0:
        from workers.training.model_parts import load_balancing  # slow import: loads the engine

        load_balancing.check_routers(policy.model.path, config.axes(policy.actor.parallel))
    if replays_routing(policy):
        from workers.models import routing  # slow import: loads transformers

        check_notes_routing(policy.rollout)
        routing.check_routers(meta_model(policy.model, "token"))
    preflight.check_reward_models(config)
    preflight.check_rollout(config)

    sections: dict[str, tuple[str, str, Any]] = {}
    for model in models.values():
        section = model.section.removesuffix(".model")
        if section and (model.trains or section not in sections):
            sections[section] = (model.strategy if model.trains else "", model.section, model.fsdp)
    check_offload(config.trainer, sections)

    rounded = [
        (model.model, model.head) for model in models.values() if model.quantization == "int8"
    ]
    if policy.rollout.quantization == "int8":
        rounded.append((policy.model, "token"))
    for described, head in rounded:
        from workers.models.quantize import check_quantizable

        check_quantizable(meta_model(described, head))


PPO_RUN = RunRecipe(
    role="actor",
    stages=("sample", "score", "estimate", "update", "sync"),
    concurrent_stages=("score", "update"),
    repeatable_stages=("score", "sync"),
    call_labels={
        "generate_sequences": "gen",
        "compute_log_prob": "old_log_prob",
        "compute_ref_log_prob": "ref",
        "compute_values": "values",
    },
    alarm_rules=ALARM_RULES,
    prepare=prepare,
    resolve=resolve,
    worker_code=worker_code,
    check_columns=check_columns,
    describe=describe,
    stub_inputs=stub_inputs,
    describe_inputs=describe_inputs,
    headline=headline,
    sample_metrics=compute_data_metrics,
)
