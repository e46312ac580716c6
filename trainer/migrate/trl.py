"""TRL's `grpo`, `sft`, `reward` or `dpo`: a script, a command line or a YAML, in our settings.

`trl.yaml` says what one field becomes; the rules here take several fields together.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.migrate.command import Flags, as_flags, num_processes, read_words
from trainer.migrate.given import GivenFlags
from trainer.migrate.table import Table
from trainer.migrate.translation import Translation, as_text
from verl_like.errors import ConfigError

PROGRAMS = {"grpo": "ppo", "sft": "sft", "reward": "reward-model", "dpo": "dpo"}
"""TRL's command -> ours."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLACES = {
    "model.": "actor_rollout_ref.model.",
    "optim.": f"{ACTOR}.optim.",
    "grad_clip": f"{ACTOR}.grad_clip",
    "checkpoint.": f"{ACTOR}.checkpoint.",
}
"""Beginning of a key of the recipes on rows -> where PPO has it."""
MARKS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "use_vllm"),
    "reward": ("center_rewards_coefficient",),
    "dpo": ("beta", "precompute_ref_log_probs", "ld_alpha", "sync_ref_model"),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field"),
}
"""Fields by which a YAML without a command is known, asked in this order."""
LOSSES = {
    "grpo": ("vanilla", "seq-mean-token-mean"),
    "bnpo": ("vanilla", "token-mean"),
    "dapo": ("vanilla", "token-mean"),
    "dr_grpo": ("vanilla", "seq-mean-token-sum-norm"),
    "cispo": ("cispo", "token-mean"),
    "luspo": ("luspo", "seq-mean-token-sum"),
    "sapo": ("sapo", "seq-mean-token-mean"),
}
"""`loss_type` of GRPO -> the policy loss, and how token losses become one number."""
DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}
NO_BOUND, NO_LEAST = "1e9", "1.0e-9"
"""A ratio that none reaches; a weight that none falls below."""
CORRECTION = (
    "vllm_importance_sampling_cap",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_correction",
    "vllm_importance_sampling_mode",
)


def translate(text: str) -> Translation:
    """Settings, and a word on every field."""
    program, given = _read(text)
    done = Translation(PROGRAMS[program], places=PLACES if program == "grpo" else {})
    unknown = f"TRL's {program} has no field"
    fields = GivenFlags(Table("trl", "all", program), given, unknown, done)
    _data(fields)
    _optimizer(fields)
    _run(fields)
    if program == "grpo":
        _sizes(fields)
        _loss(fields)
        _reference(fields)
        _rewards(fields)
        _correction(fields)
        return fields.finish()
    _rows(fields)
    if program == "dpo":
        _preferences(fields)
    if program == "reward":
        done.always.append("a head of one number: the recipe says it")
    return fields.finish()


def _read(text: str) -> tuple[str, Flags]:
    """TRL's command, and its fields; those of `--config FILE` stand behind the command's."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and all(":" in line for line in lines if not line.startswith((" ", "-"))):
        fields = _of_yaml(text)
        return _known_by_its_fields(fields), fields

    program, words = read_words(text, *PROGRAMS)
    fields = {name.replace("-", "_"): values for name, values in as_flags(words).items()}
    path = " ".join(fields.pop("config", []))
    if path:
        if not Path(path).is_file():
            raise ConfigError(f"--config {path}: there is no such file; give its own path.")
        fields = _of_yaml(Path(path).read_text(encoding="utf-8")) | fields
    if processes := num_processes(text):
        fields = {"num_processes": [processes]} | fields
    return program or _known_by_its_fields(fields), fields


def _of_yaml(text: str) -> Flags:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the YAML could not be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError("the YAML has no `field: value` lines.")
    return {str(name): [as_text(value)] for name, value in tree.items() if value is not None}


def _known_by_its_fields(fields: Flags) -> str:
    for program, marks in MARKS.items():
        if any(mark in fields for mark in marks):
            return program
    raise ConfigError(
        f"whether this is of {', '.join(PROGRAMS)} cannot be seen by its fields; give the command, "
        "`trl grpo --config FILE`."
    )


def _data(fields: GivenFlags) -> None:
    """A data set of the hub, or a file."""
    name, config = fields.value("dataset_name"), fields.value("dataset_config")
    if not name:
        return
    splits = [fields.value("dataset_train_split"), fields.value("dataset_test_split")]
    files = [name, name]
    if "/" in name and not name.startswith(("/", ".", "$")):
        place = f"hub://{name}/{config}" if config else f"hub://{name}"
        files = [f"{place}:{split}" for split in splits]
    fields.becomes("dataset_name", {"data.train_files": files[0]})
    if fields.value("eval_strategy") != "no":
        every = fields.value("eval_steps") or fields.value("logging_steps", "500")
        settings = {"data.val_files": files[1], "trainer.test_freq": every}
        fields.becomes("eval_strategy", settings)


def _optimizer(fields: GivenFlags) -> None:
    """Betas, and a warm-up in steps or as a share; a number of steps below 1 is a share."""
    betas = [fields.value("adam_beta1", "0.9"), fields.value("adam_beta2", "0.999")]
    for name in ("adam_beta1", "adam_beta2"):
        fields.becomes(name, {"optim.betas": betas})
    share, steps = fields.number("warmup_ratio", 0.0), fields.number("warmup_steps", 0.0)
    name, share = ("warmup_steps", steps) if 0 < steps < 1 else ("warmup_ratio", share)
    if steps >= 1:
        fields.becomes("warmup_steps", {"optim.lr_warmup_steps": int(steps)})
    elif share > 0:
        settings = {"optim.lr_warmup_steps": -1, "optim.lr_warmup_steps_ratio": share}
        fields.becomes(name, settings)


def _run(fields: GivenFlags) -> None:
    epochs = fields.number("num_train_epochs")
    if epochs != int(epochs):
        raise ConfigError(
            f"num_train_epochs={epochs:g}: epochs are whole here; set max_steps, or round it."
        )
    fields.becomes("num_train_epochs", {"trainer.total_epochs": int(epochs)})
    steps = fields.count("max_steps", -1)
    if steps > 0 and fields.done.program != "ppo":
        fields.becomes("max_steps", {"trainer.total_training_steps": steps})
    trackers = fields.value("report_to", "none").strip("[]").replace(" ", ",").split(",")
    known = [name for name in trackers if name in ("wandb", "tensorboard", "mlflow")]
    fields.becomes("report_to", {"trainer.logger": ["console", *known]})


def _rows(fields: GivenFlags) -> None:
    """Rows of an optimizer step, over all processes."""
    rows = fields.count("per_device_train_batch_size")
    accumulated = fields.count("gradient_accumulation_steps")
    told = f"per_device_train_batch_size={rows}, gradient_accumulation_steps={accumulated}"
    size = rows * accumulated * fields.count("num_processes", 1)
    fields.done.rename(told, {"data.train_batch_size": size})


def _preferences(fields: GivenFlags) -> None:
    """The loss, or the loss and SFT beside it."""
    losses = fields.value("loss_type").strip("[]").split(",")
    weights = fields.value("loss_weights").strip("[]").split(",")
    smoothing = fields.number("label_smoothing", 0.0)
    first = losses[0]
    settings: dict[str, Any] = {"loss": DPO_LOSSES.get(first, "dpo")}
    if first not in DPO_LOSSES:
        fields.done.absent.append(
            f"loss_type={first}: there are {', '.join(DPO_LOSSES)} and, here, kto"
        )
    if first == "sigmoid" and smoothing:
        settings["label_smoothing"] = smoothing
        fields.becomes("label_smoothing", settings)
    if losses[1:] == ["sft"]:
        of_dpo, of_sft = weights if len(weights) == 2 else ("1", "1")
        settings["sft_coef"] = float(of_sft) / float(of_dpo)
    elif len(losses) > 1:
        fields.done.absent.append(
            f"loss_type={','.join(losses)}: one loss, and SFT beside it: sft_coef"
        )
    fields.becomes("loss_type", settings)


def _sizes(fields: GivenFlags) -> None:
    """TRL counts completions of one process; here a step and an update count prompts."""
    group = fields.count("num_generations")
    rows = fields.count("per_device_train_batch_size") * fields.count("num_processes", 1)
    accumulated = fields.count("gradient_accumulation_steps")
    update = rows * accumulated
    step = rows * fields.count("steps_per_generation", accumulated)
    step = fields.count("generation_batch_size", step)
    for name, size in (("an update's", update), ("a step's", step)):
        if size % group:
            raise ConfigError(
                f"{name} {size} completions are no whole number of prompts of num_generations="
                f"{group} completions. Take a multiple."
            )
    told = (
        f"per_device_train_batch_size, gradient_accumulation_steps: {update} completions an update"
    )
    settings = {"data.train_batch_size": step // group}
    settings[f"{ACTOR}.ppo_mini_batch_size"] = min(update, step) // group
    fields.done.rename(told, settings)
    steps = fields.count("max_steps", -1)
    if steps > 0:
        updates = max(step // update, 1) * fields.count("num_iterations", 1)
        fields.becomes("max_steps", {"trainer.total_training_steps": -(-steps // updates)})


def _loss(fields: GivenFlags) -> None:
    kind = fields.value("loss_type")
    if kind not in LOSSES:
        fields.done.absent.append(f"loss_type={kind}: there are {', '.join(LOSSES)}")
    loss, aggregation = LOSSES.get(kind, LOSSES["dapo"])
    if fields.value("importance_sampling_level") == "sequence" and loss == "vanilla":
        loss = "gspo"
        settings = {f"{ACTOR}.policy_loss.loss_mode": loss}
        fields.becomes("importance_sampling_level", settings)
    chosen = {f"{ACTOR}.policy_loss.loss_mode": loss, f"{ACTOR}.loss_agg_mode": aggregation}
    fields.becomes_or_is("loss_type", "dapo", chosen)

    low, high = fields.value("epsilon"), fields.value("epsilon_high")
    if loss == "cispo":
        _bound_of_cispo(fields)
    elif high:
        bounds = {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
        fields.becomes("epsilon_high", bounds)
    else:
        fields.becomes("epsilon", {f"{ACTOR}.clip_ratio": low})
    if loss == "vanilla":
        bound_twice = {f"{ACTOR}.clip_ratio_c": fields.value("delta", NO_BOUND)}
        fields.becomes_or_is("delta", "none, no dual clip", bound_twice)


def _bound_of_cispo(fields: GivenFlags) -> None:
    bound = fields.number("epsilon_high", 5.0) - 1  # TRL bounds the ratio, we its distance from 1
    settings = {f"{ACTOR}.clip_ratio_low": "1.0", f"{ACTOR}.clip_ratio_high": f"{bound:g}"}
    fields.becomes("epsilon_high", settings)
    if not fields.has("epsilon_high"):
        fields.done.settings.update(settings)
        fields.done.absent.append(
            "loss_type=cispo without epsilon_high: there epsilon alone bounds every ratio; the "
            "command takes 5, ScaleRL's bound"
        )


def _reference(fields: GivenFlags) -> None:
    """A reference that follows the policy."""
    if fields.is_on("sync_ref_model"):
        stays = 1 - fields.number("ref_model_mixup_alpha")
        settings = {
            "actor_rollout_ref.ref.update_every": fields.value("ref_model_sync_steps"),
            "actor_rollout_ref.ref.ema_decay": f"{stays:g}",
        }
        fields.becomes("sync_ref_model", settings)


def _rewards(fields: GivenFlags) -> None:
    settings = {
        "reward_model.enable": True,
        "reward_model.model.path": fields.value("reward_model_name_or_path"),
        "reward_model.rule_weight": 1 if fields.has("reward_funcs") else 0,
    }
    fields.becomes("reward_model_name_or_path", settings)


def _correction(fields: GivenFlags) -> None:
    """Importance weights of what vLLM drew: truncated, or zero outside their bounds."""
    if not fields.is_on("use_vllm") or not fields.is_on("vllm_importance_sampling_correction"):
        return
    mode, least = fields.value(CORRECTION[4]), fields.value("vllm_importance_sampling_clip_min")
    largest = fields.value(CORRECTION[1]) or fields.value(CORRECTION[0])
    level, _, kind = mode.partition("_")
    if kind == "truncate" and least:
        fields.done.absent.append(
            f"vllm_importance_sampling_clip_min={least}: weights are truncated from above alone"
        )
    bounds = f"{least or NO_LEAST}_{float(largest)}" if kind == "mask" else largest
    settings = {
        "algorithm.rollout_correction.rollout_is": level,
        "algorithm.rollout_correction.rollout_is_threshold": bounds,
    }
    for name in CORRECTION:
        fields.becomes(name, settings)
    told = f"{mode}, up to {largest}"
    fields.done.default("vllm_importance_sampling_mode", told, settings)
