"""Checks before any process starts, for recipes that sample: models, engines, environments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainer.config.devices import run_devices
from trainer.data.files import is_num_prompts
from trainer.data.model_config import num_positions, read_model_config
from trainer.data.prompts import PromptSet
from trainer.groups.nodes import joined_cluster
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from verl_like.registry import check_file
from workers.config import has_environment, reward_configs
from workers.models.folder import model_folder
from workers.models.load import check_score_head, check_weights
from workers.models.precision import name_of as dtype_name
from workers.models.precision import rollout_dtype
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
    """Reject prompts with images that vLLM cannot read."""
    if not has_images:
        return
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
    roles = map(config.of_role, expand_roles(config.role_mapping))  # engines may differ
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
