"""Translate a command of OpenRLHF's `train_ppo_ray`, `train_sft`, `train_rm` or `train_dpo`.

`openrlhf.yaml` and `openrlhf_rows.yaml` have the flags and most rules; this module has the rules
that build lists: pools and rewards. Since 2026 the flags have sections (`--actor.adam.lr`); before
that, they had none (`--actor_learning_rate`). Both are read.
"""

from __future__ import annotations

from typing import Any

from trainer.tools.migrate.recorder import Command
from trainer.tools.migrate.translation import (
    CommandFlags,
    Table,
    Translation,
    as_flags,
    find_program,
    last_name,
    num_processes,
)
from verl_like.errors import ConfigError

GPUS_OF_A_NODE = 8
ON_ROWS = {"train_sft": "sft", "train_rm": "reward-model", "train_dpo": "dpo"}
"""OpenRLHF's commands on rows -> ours."""
OTHERS = ("train_kto", "train_kd", "train_prm", "train_ppo")
"""Older commands, which are not translated."""


def translate(command: Command) -> Translation | None:
    """Return our settings and a line on every flag; None if the script does not train."""
    names = ("train_ppo_ray", *ON_ROWS, *OTHERS)
    parts = find_program(command.words, lambda name: last_name(name) in names, "train_ppo_ray")
    if parts is None:
        return None
    launcher, program, words = parts
    name = last_name(program)
    if name in OTHERS:
        supported = ", ".join(names[: -len(OTHERS)])
        raise ConfigError(f"{program} cannot be translated. Supported: {supported}.")
    if name in ON_ROWS:
        table, done = Table("openrlhf_rows", "all", name), Translation(ON_ROWS[name])
        processes = num_processes(launcher) or GPUS_OF_A_NODE
        done.default("the launcher's processes", processes, {"trainer.n_gpus_per_node": processes})
        return CommandFlags(table, as_flags(words), f"{name} has no flag", done).finish()
    flags = CommandFlags(Table("openrlhf"), as_flags(words), "train_ppo_ray has no flag")
    _rewards(flags)
    # importance weights: older flags have one threshold, newer ones two
    is_newer = "." in flags.spelled("enable_vllm_is_correction")
    threshold = flags.value("vllm_is_truncated_threshold") or ("5.0" if is_newer else "2")
    low, high = flags.values("algo.advantage.is_correction_threshold") or ("0.5", threshold)
    kind = flags.value("algo.advantage.is_correction_type")
    bounds = f"{low}_{high}"
    settings = {"rollout_is": "token", "rollout_is_threshold": bounds if kind == "icepop" else high}
    if kind not in ("tis", "icepop"):
        settings |= {"rollout_rs": "geometric", "rollout_rs_threshold": bounds}
    section = "algorithm.rollout_correction"
    flags.becomes(
        "enable_vllm_is_correction", {f"{section}.{name}": v for name, v in settings.items()}
    )
    _placement(flags)
    return flags.finish()


def _rewards(flags: CommandFlags) -> None:
    """Translate reward servers, functions or models; several become `reward.list`."""
    urls, models = flags.value("remote_rm_url"), flags.value("reward_pretrain")
    if urls.endswith(".py"):
        settings = {"reward.function.path": urls, "reward.function.name": "compute_score"}
        flags.becomes("remote_rm_url", settings)
        flags.done.incomplete.append(
            "reward_func(queries, prompts, labels): rename it to compute_score, with the "
            "parameters solution_strs, raw_prompts, ground_truths; it returns a list"
        )
    elif urls:
        flags.becomes("remote_rm_url", {"reward.list": _reward_list(urls, "url")})
    if "," in models:
        flags.becomes("reward_pretrain", {"reward.list": _reward_list(models, "path")})
    else:
        model = {"model.enable": True, "model.path": models, "function.weight": 0}
        flags.becomes("reward_pretrain", {f"reward.{key}": model[key] for key in model})
    low, high = flags.values("reward_clip_range") or ("-10", "10")
    if low != f"-{high}":
        flags.done.rejected.append(
            f"--reward_clip_range {low} {high}: scores are clamped symmetrically around 0"
        )
    flags.becomes("reward_clip_range", {"algorithm.score_clip": high})
    flags.done.default("--reward_clip_range", high, {"algorithm.score_clip": high})


def _reward_list(places: str, column: str) -> str:
    """Return the value of `reward.list` for servers at URLs, or for models in folders."""
    kind = "remote, protocol: openrlhf" if column == "url" else "model"
    items = [
        f'{{name: reward_{number}, kind: {kind}, {column}: "{place}"}}'
        for number, place in enumerate(places.split(","))
    ]
    return f"[{', '.join(items)}]"


def _placement(flags: CommandFlags) -> None:
    """Put colocated roles on the first role's pool, and every other role on its own pool."""
    if flags.has("colocate_all_models"):
        nodes = _pool(flags, "actor")
        settings: dict[str, Any] = {"placement": "colocate", "trainer.nnodes": len(nodes)}
        settings["trainer.n_gpus_per_node"] = nodes[0]
        flags.becomes("colocate_all_models", settings)
        return
    has_critic = flags.value("advantage_estimator", "gae") == "gae"
    has_reference = flags.computed("not given('init_kl_coef') or init_kl_coef > 0")
    engines = flags.computed("(vllm_num_engines or 0) * (vllm_tensor_parallel_size or 1)")
    shared = {}
    if flags.has("colocate_actor_ref"):
        shared["ref"] = "actor_pool"
    if flags.has("colocate_critic_reward") and has_critic:
        shared["reward_model"] = "critic_pool"
    if not engines:
        shared["rollout"] = "actor_pool"

    pools = {"actor_pool": _pool(flags, "actor")}
    if engines:
        full, rest = divmod(engines, GPUS_OF_A_NODE)
        pools["rollout_pool"] = [GPUS_OF_A_NODE] * full + [rest] * (rest > 0)
    if has_reference and "ref" not in shared:
        pools["ref_pool"] = _pool(flags, "ref")
    if has_critic:
        pools["critic_pool"] = _pool(flags, "critic")
    if flags.has("reward_pretrain") and "reward_model" not in shared:
        pools["reward_pool"] = _pool(flags, "reward")

    settings = {"placement": "standalone"}
    settings |= {f"role_mapping.{role}": pool for role, pool in shared.items()}
    settings |= {f"resource_pool_spec.{pool}": processes for pool, processes in pools.items()}
    total = sum(sum(processes) for processes in pools.values())
    settings["trainer.nnodes"] = max(-(-total // GPUS_OF_A_NODE), *map(len, pools.values()))
    settings["trainer.n_gpus_per_node"] = min(total, GPUS_OF_A_NODE)
    flags.done.rename("--*_num_nodes, --*_num_gpus_per_node, --colocate_*", settings)
    flags.done.absent.append(
        f"number of GPUs per node: {GPUS_OF_A_NODE} is assumed; set trainer.nnodes and "
        "trainer.n_gpus_per_node if yours differ"
    )


def _pool(flags: CommandFlags, role: str) -> list[int]:
    """Return the GPUs of a role on each of its nodes."""
    return [flags.count(f"{role}_num_gpus_per_node")] * flags.count(f"{role}_num_nodes")
