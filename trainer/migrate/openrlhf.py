"""A command of OpenRLHF's `train_ppo_ray`, `train_sft`, `train_rm` or `train_dpo`, in our settings.

`openrlhf.yaml` and `openrlhf_rows.yaml` say what one flag becomes; the rules here take several
flags together. Since 2026 the flags have sections (`--actor.adam.lr`), before they had none
(`--actor_learning_rate`); both are read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trainer.migrate.command import as_flags, last_name, num_processes, program_or_flags
from trainer.migrate.given import GivenFlags
from trainer.migrate.recorder import Command
from trainer.migrate.table import Table
from trainer.migrate.translation import Translation
from verl_like.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
CARDS_OF_A_NODE = 8
ON_ROWS = {"train_sft": "sft", "train_rm": "reward-model", "train_dpo": "dpo"}
"""Their commands on rows -> ours."""
OTHERS = ("train_kto", "train_kd", "train_prm", "train_ppo")
"""Older ones, of which there is nothing here."""


def translate(command: Command) -> Translation | None:
    """Settings, and a word on every flag; None of what is no training."""
    names = ("train_ppo_ray", *ON_ROWS, *OTHERS)
    found = program_or_flags(command.words, lambda name: last_name(name) in names, "train_ppo_ray")
    if found is None:
        return None
    launcher, program, words = found
    name = last_name(program)
    if name in OTHERS:
        raise ConfigError(f"{program} is not translated: {', '.join(names[: -len(OTHERS)])} are.")
    if name in ON_ROWS:
        return _on_rows(name, launcher, words)
    flags = GivenFlags(Table("openrlhf"), as_flags(words), "train_ppo_ray has no flag")
    _critic(flags)
    _lengths(flags)
    _rewards(flags)
    _sizes(flags)
    _correction(flags)
    _kl(flags)
    _warm_up(flags)
    _placement(flags)
    _run(flags)
    _at_most(flags, flags.count("num_episodes", 1), flags.count("rollout_batch_size"))
    return flags.finish()


def _on_rows(name: str, launcher: Sequence[str], words: Sequence[str]) -> Translation:
    """SFT, a reward model, DPO: an optimizer step counts rows, as here."""
    table, done = Table("openrlhf_rows", "all", name), Translation(ON_ROWS[name])
    flags = GivenFlags(table, as_flags(words), f"{name} has no flag", done)
    processes = num_processes(launcher) or str(CARDS_OF_A_NODE)
    done.default("the launcher's processes", processes, {"trainer.n_gpus_per_node": processes})
    if flags.has("micro_train_batch_size"):
        done.default("passes of as many tokens", "none", {"data.use_dynamic_bsz": False})
    _trackers(flags)
    _at_most(flags, flags.count("max_epochs"), flags.count("train_batch_size"))
    if name == "train_sft":
        _columns(flags)
    return flags.finish()


def _at_most(flags: GivenFlags, epochs: int, batch: int) -> None:
    """The first so many rows of the data there, as many rows here."""
    if flags.has("max_samples"):
        steps = math.ceil(flags.count("max_samples") / batch) * epochs
        flags.becomes("max_samples", {"trainer.total_training_steps": steps})


def _columns(flags: GivenFlags) -> None:
    """Rows have the columns `messages`, or `prompt` and `response`."""
    theirs, answer = flags.value("input_key", "input"), flags.value("output_key")
    template = "" if flags.is_on("apply_chat_template") else flags.value("input_template")
    if flags.is_on("pretrain_mode"):
        wanted = {"text": theirs}
    elif flags.is_on("multiturn") or not answer:
        wanted = {"messages": theirs}
    else:
        wanted = {"prompt": theirs, "response": answer}
    told = ", ".join(f"{ours} from {name}" for ours, name in wanted.items() if ours != name)
    if template and "prompt" in wanted:
        told += f"{', ' if told else ''}prompt within '{template}'"
        if theirs == "prompt":  # a run would start, on other prompts
            flags.done.refused.append(f"--input_template '{template}': write it into the prompts")
    if told:
        flags.done.absent.append(
            f"--input_key, --output_key: the columns are {', '.join(wanted)}; write the file so "
            f"first (a file without them is refused): {told}"
        )


def _has_critic(flags: GivenFlags) -> bool:
    return flags.value("advantage_estimator", "gae") == "gae"


def _has_reference(flags: GivenFlags) -> bool:
    return not flags.has("init_kl_coef") or flags.number("init_kl_coef") > 0


def _critic(flags: GivenFlags) -> None:
    if not flags.has("critic_pretrain") and _has_critic(flags) and flags.has("reward_pretrain"):
        first = flags.value("reward_pretrain").split(",")[0]
        flags.done.default("--critic_pretrain", "the reward model", {"critic.model.path": first})


def _lengths(flags: GivenFlags) -> None:
    """There the prompt and its response share `--max_len`; here each has a limit."""
    if not flags.has("max_len"):
        return
    whole = flags.count("max_len")
    if flags.has("generate_max_len"):
        prompt = whole - flags.count("generate_max_len")
        flags.becomes("max_len", {"data.max_prompt_length": prompt})
        return
    half = whole // 2
    flags.becomes("max_len", {"data.max_prompt_length": half, "data.max_response_length": half})
    flags.done.absent.append(
        f"{flags.spelled('max_len')} alone: a response has what its prompt leaves there; here each "
        "has a limit, so look whether halves are right"
    )


def _rewards(flags: GivenFlags) -> None:
    urls, models = flags.value("remote_rm_url"), flags.value("reward_pretrain")
    if urls.endswith(".py"):
        function = {
            "custom_reward_function.path": urls,
            "custom_reward_function.name": "compute_score",
        }
        flags.becomes("remote_rm_url", function)
        flags.done.absent.append(
            "reward_func(queries, prompts, labels): name it compute_score, and its parameters by "
            "what they hold: solution_strs, raw_prompts, ground_truths; it returns a list"
        )
    elif urls:
        flags.becomes("remote_rm_url", {"rewards": _reward_list(urls, "url")})

    if "," in models:
        flags.becomes("reward_pretrain", {"rewards": _reward_list(models, "path")})
    else:
        model = {"enable": True, "model.path": models, "rule_weight": 0}
        settings = {f"reward_model.{name}": value for name, value in model.items()}
        flags.becomes("reward_pretrain", settings)
    low, high = flags.values("reward_clip_range") or ("-10", "10")
    if low == f"-{high}":
        flags.becomes_or_is("reward_clip_range", 10, {"algorithm.score_clip": high})
    else:
        flags.done.refused.append(
            f"--reward_clip_range {low} {high}: scores are clamped evenly about 0"
        )


def _reward_list(places: str, column: str) -> str:
    """The value of `rewards` for servers at URLs, or for models in folders."""
    kind = "remote, protocol: openrlhf" if column == "url" else "model"
    items = []
    for number, place in enumerate(places.split(",")):
        items.append(f'{{name: reward_{number}, kind: {kind}, {column}: "{place}"}}')
    return f"[{', '.join(items)}]"


def _sizes(flags: GivenFlags) -> None:
    """An optimizer step counts samples there, prompts here."""
    num_samples = flags.count("n_samples_per_prompt", 1)
    step = flags.count("train_batch_size")
    if step % num_samples:
        raise ConfigError(
            f"{flags.spelled('train_batch_size')} {step} samples are no whole number of prompts of "
            f"{flags.spelled('n_samples_per_prompt')} {num_samples} samples: an optimizer step has "
            "whole groups here. Take a multiple."
        )
    settings = {f"{ACTOR}.ppo_mini_batch_size": step // num_samples}
    flags.becomes_or_is("train_batch_size", "128 samples", settings)
    if flags.has("micro_train_batch_size") or flags.has("micro_rollout_batch_size"):
        if not flags.has("use_dynamic_batch"):
            by_rows = {f"{ACTOR}.use_dynamic_bsz": False}
            flags.done.default("--use_dynamic_batch", "off", by_rows)


def _correction(flags: GivenFlags) -> None:
    """Importance weights of what vLLM drew: older flags have one threshold, newer ones two."""
    if not flags.has("enable_vllm_is_correction"):
        return
    is_newer = "." in flags.spelled("enable_vllm_is_correction")
    one = flags.value("vllm_is_truncated_threshold") or ("5.0" if is_newer else "2")
    low, high = flags.values("algo.advantage.is_correction_threshold") or ("0.5", one)
    kind = flags.value("algo.advantage.is_correction_type")
    bounds = f"{low}_{high}"
    settings = {"rollout_is": "token", "rollout_is_threshold": bounds if kind == "icepop" else high}
    if kind not in ("tis", "icepop"):
        settings |= {"rollout_rs": "geometric", "rollout_rs_threshold": bounds}
    section = "algorithm.rollout_correction"
    flags.becomes(
        "enable_vllm_is_correction", {f"{section}.{name}": v for name, v in settings.items()}
    )


def _kl(flags: GivenFlags) -> None:
    """In the loss, or in the reward, where its weight may follow a target."""
    coefficient, estimator = flags.value("init_kl_coef"), flags.ours("kl_estimator")
    if not _has_reference(flags):
        flags.becomes("init_kl_coef", {"algorithm.use_kl_in_reward": False})
        return
    if flags.has("use_kl_loss"):
        of_loss = {"use_kl_loss": True, "kl_loss_coef": coefficient, "kl_loss_type": estimator}
        flags.becomes("use_kl_loss", {f"{ACTOR}.{name}": value for name, value in of_loss.items()})
        return
    settings: dict[str, Any] = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": estimator,
        "algorithm.kl_ctrl.kl_coef": coefficient,
    }
    if flags.has("kl_target"):
        settings["algorithm.kl_ctrl.type"] = "adaptive"
        settings["algorithm.kl_ctrl.target_kl"] = flags.value("kl_target")
        settings["algorithm.kl_ctrl.horizon"] = flags.value("kl_horizon")
    flags.becomes_or_is("init_kl_coef", coefficient, settings)


def _warm_up(flags: GivenFlags) -> None:
    """The critic's share is the actor's where it has none of its own."""
    share = flags.value("critic.lr_warmup_ratio") or flags.value("lr_warmup_ratio")
    steps = {"critic.optim.lr_warmup_steps": -1, "critic.optim.lr_warmup_steps_ratio": share}
    flags.becomes_or_is("critic.lr_warmup_ratio", share, steps)


def _placement(flags: GivenFlags) -> None:
    """Roles that are colocated share the first one's pool; the others have pools of their own."""
    if flags.has("colocate_all_models"):
        nodes = _cards(flags, "actor")
        settings: dict[str, Any] = {"placement": "colocate", "trainer.nnodes": len(nodes)}
        settings["trainer.n_gpus_per_node"] = nodes[0]
        flags.becomes("colocate_all_models", settings)
        return
    shared = {}
    if flags.has("colocate_actor_ref"):
        shared["ref"] = "actor_pool"
    if flags.has("colocate_critic_reward") and _has_critic(flags):
        shared["reward_model"] = "critic_pool"
    engines = flags.count("vllm_num_engines", 0) * flags.count("vllm_tensor_parallel_size", 1)
    if not engines:
        shared["rollout"] = "actor_pool"

    pools = {"actor_pool": _cards(flags, "actor")}
    if engines:
        full, rest = divmod(engines, CARDS_OF_A_NODE)
        pools["rollout_pool"] = [CARDS_OF_A_NODE] * full + ([rest] if rest else [])
    if _has_reference(flags) and "ref" not in shared:
        pools["ref_pool"] = _cards(flags, "ref")
    if _has_critic(flags):
        pools["critic_pool"] = _cards(flags, "critic")
    if flags.has("reward_pretrain") and "reward_model" not in shared:
        pools["reward_pool"] = _cards(flags, "reward")

    settings = {"placement": "standalone"}
    settings |= {f"role_mapping.{role}": pool for role, pool in shared.items()}
    settings |= {f"resource_pool_spec.{pool}": processes for pool, processes in pools.items()}
    total = sum(sum(processes) for processes in pools.values())
    settings["trainer.nnodes"] = max(-(-total // CARDS_OF_A_NODE), *map(len, pools.values()))
    settings["trainer.n_gpus_per_node"] = min(total, CARDS_OF_A_NODE)
    flags.done.rename("--*_num_nodes, --*_num_gpus_per_node, --colocate_*", settings)
    flags.done.absent.append(
        f"how many cards a node has: {CARDS_OF_A_NODE} are taken for it; set trainer.nnodes and "
        "trainer.n_gpus_per_node where yours have others"
    )


def _cards(flags: GivenFlags, role: str) -> list[int]:
    """Cards of a role on each of its nodes."""
    per_node = flags.count(f"{role}_num_gpus_per_node")
    return [per_node] * flags.count(f"{role}_num_nodes")


def _run(flags: GivenFlags) -> None:
    if not flags.count("vllm_num_engines", 0):
        engine = {f"{ROLLOUT}.name": "native"}
        flags.done.default("--vllm_num_engines", "0: the actor generates", engine)
    _trackers(flags)
    if flags.has("dynamic_filtering"):
        flags.done.always.append(
            "the range of dynamic filtering: groups that score alike are left out, which for "
            "rewards of 0 and 1 is the range from 0 to 1"
        )
    if flags.has("ref_reward_offload"):
        flags.done.absent.append("offload of the reward model: it stays on its device")


def _trackers(flags: GivenFlags) -> None:
    loggers = {"use_wandb": "wandb", "use_tensorboard": "tensorboard"}
    names = ["console", *(ours for flag, ours in loggers.items() if flags.has(flag))]
    for flag in loggers:
        flags.becomes(flag, {"trainer.logger": names})
