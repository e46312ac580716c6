"""Checks before any process starts, for recipes that sample: models, engines, rewards.

Rewards are checked before any model is loaded: their keys, then their results.

    check_rewards(config)
    reject_wrong_results(rewards, prompts, tokenizer, config.data.max_response_length)

Reward functions run on synthetic responses: the row's ground truth as text, or the prompt if it has
none. Reward models and servers are not called.
"""

from __future__ import annotations

from concurrent.futures import wait
from pathlib import Path
from typing import Any

import torch

from trainer.config.devices import run_devices
from trainer.data.files import is_num_prompts
from trainer.data.model_config import num_positions, read_model_config
from trainer.data.prompts import PromptSet
from trainer.groups.nodes import joined_cluster
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.registry import check_file
from workers.config import has_environment, reward_configs
from workers.models.folder import model_folder, read_hf_config
from workers.models.load import check_score_head, check_weights
from workers.models.precision import name_of as dtype_name
from workers.models.precision import rollout_dtype
from workers.rewards.outcome import NO_REWARD, with_source
from workers.rewards.weighted import FIRST_MESSAGE_S, Rewards
from workers.rollout.build_engine import resolve_engine, user_engine


def check_model(config: Any, key: str, path: str, may_be_random: bool = True) -> None:
    """Reject a model that is missing, or that has fewer positions than a sample may have tokens."""
    limit = num_positions(read_model_config(key, path))
    if config.trainer.simulate is None:
        check_weights(key, path, config.actor_rollout_ref.model if may_be_random else None)
    data = config.data
    width = data.max_prompt_length + data.max_response_length
    if limit is not None and width > limit:
        raise ConfigError(
            f"data.max_prompt_length={data.max_prompt_length} + "
            f"data.max_response_length={data.max_response_length} = {width} tokens, but "
            f"{key}={path} has {limit} positions. Lower their sum by {width - limit}."
        )


def check_reward_files(config: Any) -> None:
    """Reject a reward function whose file is missing."""
    for number, reward in enumerate(reward_configs(config)):
        if reward.kind == "function" and reward.path.endswith(".py"):
            section = f"reward.list[{number}]" if config.reward.list else "reward.function"
            check_file(Path(reward.path), f"{section}.path={reward.path}")


def check_reward_models(config: Any) -> None:
    """Reject reward models without files, weights or a score head, or with too few positions."""
    for number, reward in enumerate(reward_configs(config)):
        if reward.kind == "model":
            key = f"reward.list[{number}].path" if config.reward.list else "reward.model.path"
            check_model(config, key, reward.path, may_be_random=False)
            check_score_head(key, reward.path)


def check_rollout(config: Any, role: str = "rollout") -> None:
    """Reject an unknown engine, and vLLM if it is missing, untested, or does not fit the pool.

    vLLM's tensor-parallel size must divide the number of processes in the role's pool.
    """
    rollout = config.actor_rollout_ref.rollout
    user_engine(rollout.name)
    pool = expand_roles(config.role_mapping)[role]
    ranks = sum(config.resource_pool_spec[pool])
    size = rollout.tensor_model_parallel_size
    if rollout.name == "vllm" and ranks % size:
        divisors = ", ".join(str(d) for d in range(1, ranks + 1) if ranks % d == 0)
        processes = "1 process" if ranks == 1 else f"{ranks} processes"
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide the "
            f"{processes} of {role}'s pool {pool!r}; values that do: {divisors}."
        )
    # the versions on other machines are not known
    elsewhere = joined_cluster(config) or config.trainer.simulate or rollout.server_urls
    if rollout.name == "vllm" and not elsewhere:
        from workers.rollout.vllm.setup import check_version

        check_version(run_devices(config.trainer).type)


def check_vllm(config: Any, reads_images: bool) -> None:
    """Reject a policy that vLLM starts, but whose log-probs it cannot compute."""
    from workers.rollout.vllm import setup

    policy, device_type = config.actor_rollout_ref, run_devices(config.trainer).type
    dtype = dtype_name(rollout_dtype(policy, device_type))
    folder = model_folder(policy.model.path, weights=False)
    setup.check_model(str(folder), reads_images, device_type, dtype)


def check_images(config: Any, has_images: bool) -> None:
    """Reject prompts with images that the policy, or vLLM, cannot read."""
    if not has_images:
        return
    from workers.models.images import why_no_images

    path = config.actor_rollout_ref.model.path
    reason = why_no_images(read_hf_config(model_folder(path, weights=False)))
    if reason:
        raise ConfigError(
            f"actor_rollout_ref.model.path={path}: {reason}, but the prompts have images, or "
            "environment.images=true. Remove the images, or use a model that docs/vision.md lists."
        )
    if (
        resolve_engine(config.actor_rollout_ref.rollout.name, run_devices(config.trainer).type)
        == "vllm"
    ):
        check_vllm(config, reads_images=True)
    if config.actor_rollout_ref.rollout.server_urls:
        raise ConfigError(
            "actor_rollout_ref.rollout.server_urls: vLLM servers read only text here, but the "
            "prompts have images. Leave this key out to run vLLM in the rollout's processes, or "
            "set data.image_key=null to leave out the images."
        )


def sampling_code(config: Any) -> list[str]:
    """Return names or paths of the engines and environments that rollout workers load."""
    roles = map(config.for_role, expand_roles(config.role_mapping))  # engines may differ
    code = [role.actor_rollout_ref.rollout.name for role in roles]
    if has_environment(config):
        section = config.environment
        code += [section.path, *section.paths.values(), *section.tools]
        code.append(section.tool_call_parser or "")
    return code


def note_images(config: Any, *prompt_sets: PromptSet | None) -> None:
    """Tell the prompt sets if environments may add images to their rows."""
    for prompts in prompt_sets:
        if prompts is not None and has_environment(config) and config.environment.images:
            prompts.has_images = True


def with_full_paths(config: Any) -> Any:
    """Make the paths of environment files absolute, because workers may run in another folder."""
    if not has_environment(config):
        return config
    from trainer.rollouts.environments import full_paths

    return full_paths(config)


def check_promptless_rows(config: Any) -> None:
    """Reject a number of prompts instead of files unless an environment makes the prompts."""
    for setting in ("train_files", "val_files"):
        files = getattr(config.data, setting)
        if is_num_prompts(files) and not has_environment(config):
            raise ConfigError(
                f"data.{setting}={files} is a number of prompts, but there is no "
                f"environment that makes them. Set environment=FILE.py:CLASS, or name a file."
            )


def check_rewards(config: Any) -> None:
    """Raise if the configured rewards cannot score samples."""
    if config.reward.list:
        names = [reward.name for reward in config.reward.list]
        for number, reward in enumerate(config.reward.list):
            where = f"reward.list[{number}]"
            if not reward.name.isidentifier() or names.index(reward.name) != number:
                raise ConfigError(
                    f"{where}.name={reward.name!r}: every reward needs a unique name of letters, "
                    "digits and _ that does not begin with a digit, because its metrics, columns "
                    "and roles contain the name."
                )
            if reward.kind == "model" and not reward.path:
                raise ConfigError(
                    f"{where} is a model. Set its path to the folder of a classifier."
                )
            if reward.kind == "remote":
                from workers.rewards.remote import check_url

                check_url(reward.url, reward.name)

        if not any(reward.weight for reward in config.reward.list):
            raise ConfigError(
                f"every weight in reward.list is 0 ({', '.join(names)}), so no reward counts. "
                "Set another weight."
            )
    elif config.reward.model.enable and not config.reward.model.path:
        raise ConfigError(
            "reward.model.enable=true needs a model. Set reward.model.path to the folder of a "
            "sequence classifier."
        )

    buffer, limit = config.reward.overlong_penalty, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        raise ConfigError(
            f"reward.overlong_penalty.len={buffer.len} tokens: it must be between 1 and "
            f"data.max_response_length={limit}; DAPO uses a fifth of this limit."
        )


def reject_wrong_results(rewards: Rewards, prompts: PromptSet, tokenizer: Any, width: int) -> None:
    """Raise if a user's function gives no reward for the first row's ground truth.

    With `on_failure: skip`, only a result of the wrong kind raises. Other failures are printed,
    because the function may work on a model's responses.
    """
    for part in rewards.parts:
        if part.manager is None or part.config.kind != "function" or not part.config.path:
            continue
        row = synthetic_responses(prompts, prompts.rows[:1].tolist(), tokenizer, width)
        future = part.manager.remote(row)
        wait([future], FIRST_MESSAGE_S)
        if not future.done():
            rewards.note_slow(part, "the first row, before models are loaded")
        scored, label = future.result(), part.config.label
        if scored.note:
            print(f"note: {label}: {scored.note}", flush=True)
        for failure in scored.failures.values():
            error = with_source(failure.error)
            tried = "ground truth" if has_truth(row)[0] else "prompt"
            problem = f"{label}, tried on the first row's {tried}: {error}"
            if NO_REWARD in error or part.config.on_failure != "skip":
                raise ConfigError(problem)
            print(f"note: {' '.join(problem.split())}", flush=True)


def has_truth(batch: DataProto) -> list[bool]:
    """Return for each row whether it has a ground truth."""
    return [rule["ground_truth"] is not None for rule in batch.non_tensor_batch["reward_model"]]


def synthetic_responses(
    prompts: PromptSet, rows: list[int], tokenizer: Any, width: int
) -> DataProto:
    """Return these rows with their ground truths, or without one their prompts, as responses."""
    batch = prompts.batch(rows, epoch=0)
    responses = torch.full((len(batch), width), tokenizer.pad_token_id, dtype=torch.int64)
    mask = torch.zeros_like(responses)
    for row, rule in enumerate(batch.non_tensor_batch["reward_model"]):
        truth = rule["ground_truth"]
        if truth is None:
            from workers.rewards.call import prompt_text

            truth = prompt_text({"raw_prompt": batch.non_tensor_batch["raw_prompt"][row]})
        text = truth if isinstance(truth, str) else str(truth)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"][:width]
        ids = ids or [tokenizer.eos_token_id or 0]
        responses[row, : len(ids)] = torch.tensor(ids)
        mask[row, : len(ids)] = 1
    return batch.union(DataProto.from_dict({"responses": responses, "response_mask": mask}))
