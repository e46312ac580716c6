"""A command of TRL's, or its YAML, in our settings: `grpo`, `sft`, `reward`, `dpo`, `kto`.

`trl.yaml` says what one field becomes; the rules here take several fields together. Scripts of
TRL's examples go by these fields, too, where they add nothing of their own.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.migrate.command import Flags, as_flags, last_name, num_processes, program_or_flags
from trainer.migrate.given import GivenFlags
from trainer.migrate.recorder import Command
from trainer.migrate.table import Table
from trainer.migrate.translation import Translation, as_text
from verl_like.errors import ConfigError

PROGRAMS = {"grpo": "ppo", "sft": "sft", "reward": "reward-model", "dpo": "dpo", "kto": "dpo"}
"""TRL's command -> ours."""
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PLACES = {
    "model.": "actor_rollout_ref.model.",
    "optim.": f"{ACTOR}.optim.",
    "grad_clip": f"{ACTOR}.grad_clip",
    "checkpoint.": f"{ACTOR}.checkpoint.",
}
"""Beginning of a key of the recipes on rows -> where PPO has it."""
SCRIPTS = {**{name: name for name in PROGRAMS}, "reward_modeling": "reward"}
"""Script -> the command that it is."""
PLACES_OF_SCRIPTS = ("examples.scripts.", "trl.scripts.", "trl.experimental.")
FIELD = re.compile(r"\w+:(\s|$)")
MARKS = {
    "grpo": ("num_generations", "max_completion_length", "reward_funcs", "epsilon", "use_vllm"),
    "reward": ("center_rewards_coefficient",),
    "kto": ("desirable_weight", "undesirable_weight"),
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


def translate(command: Command) -> Translation | None:
    """Settings, and a word on every field; None of what is no training."""
    found = program_or_flags(command.words, lambda name: _is_program(name, command.words))
    if found is None:
        return None
    launcher, name, words = found
    if name and last_name(name) not in SCRIPTS:
        raise ConfigError(
            f"{name}.py is a script of its own, which nothing here stands for; those that are "
            f"known: {', '.join(SCRIPTS)}."
        )
    fields = {name.replace("-", "_"): values for name, values in as_flags(words).items()}
    if "lora_target_modules" in fields:  # some write commas between them
        modules = ",".join(fields["lora_target_modules"]).split(",")
        fields["lora_target_modules"] = [module for module in modules if module]
    path = " ".join(fields.pop("config", []))
    if path:
        file = Path(command.folder, path)
        if not file.is_file():
            raise ConfigError(f"--config {path}: there is no such file; give its own path.")
        fields = _of_yaml(file.read_text(encoding="utf-8")) | fields
    processes = _processes(launcher, command)
    if processes:
        fields = {"num_processes": [processes]} | fields
    done = _translated(SCRIPTS.get(last_name(name), "") or _known_by_its_fields(fields), fields)
    if not processes and {"trl", "accelerate"} & {word.rpartition("/")[2] for word in launcher}:
        done.absent.append(
            "how many processes there are, by which a step's rows are multiplied: one is taken; "
            "accelerate takes every GPU unless --num_processes says how many"
        )
    return done


def read_yaml(text: str) -> Translation | None:
    """Settings of a YAML without a command; None of what is no YAML of fields."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if not lines or not all(FIELD.match(line) for line in lines if line[0] not in " -"):
        return None
    fields = _of_yaml(text)
    return _translated(_known_by_its_fields(fields), fields)


def _is_program(name: str, words: Sequence[str]) -> bool:
    """A command of `trl`, a module or a script of TRL's, or a file of one's name."""
    if words[0].rpartition("/")[2] == "trl":
        return name in PROGRAMS
    is_file = any(word.endswith(f"{last_name(name)}.py") for word in words)
    return name.startswith(PLACES_OF_SCRIPTS) or (last_name(name) in SCRIPTS and is_file)


def _processes(launcher: Sequence[str], command: Command) -> str:
    """Processes that the launcher starts, by its flags, accelerate's YAML or the GPUs it sees."""
    if given := num_processes(launcher):
        return given
    path = "".join(as_flags(launcher).get("config_file", [])[:1])
    if path and (file := Path(command.folder, path)).is_file():
        return "".join(_of_yaml(file.read_text(encoding="utf-8")).get("num_processes", []))
    if launcher and (gpus := command.environment.get("CUDA_VISIBLE_DEVICES")):
        return str(len(gpus.split(",")))
    return ""


def _translated(program: str, given: Flags) -> Translation:
    done = Translation(PROGRAMS[program], places=PLACES if program == "grpo" else {})
    table, unknown = Table("trl", "all", program), f"TRL's {program} has no field"
    for name in [name for name in given if name.startswith("no_")]:
        if table.find(name.removeprefix("no_")):  # their parser's form of a switch that is off
            given = {key: value for key, value in given.items() if key != name}
            given[name.removeprefix("no_")] = ["False"]
    fields = GivenFlags(table, given, unknown, done)
    _data(fields)
    _optimizer(fields)
    _run(fields)
    if fields.is_on("use_peft") and not fields.has("lora_dropout"):
        done.absent.append("--lora_dropout is 0.05 there: adapters have no dropout")
    if program == "grpo":
        _sizes(fields)
        _loss(fields)
        _reference(fields)
        _rewards(fields)
        _correction(fields)
        return fields.finish()
    _rows(fields)
    if program == "sft":
        _texts(fields)
    if program == "dpo":
        _preferences(fields)
    if program == "kto":
        done.always.append("the KL of mismatched answers is of the whole batch, not of a pass")
    if program == "reward":
        done.always.append("a head of one number: the recipe says it")
    return fields.finish()


def _texts(fields: GivenFlags) -> None:
    """Packed rows are as long as the longest; what of messages is learned."""
    fields.done.absent.append(
        "the column completion: it is called response here; write the file so first"
    )
    if not fields.is_on("assistant_only_loss") and not fields.has("completion_only_loss"):
        fields.done.absent.append(
            "the loss of rows with messages, on every token there: it is on what the assistant "
            "says; data.loss_on=all is theirs"
        )
    if fields.is_on("packing"):
        longest = fields.count("max_length", 1024)
        rows = fields.count("per_device_train_batch_size")
        rows *= fields.count("gradient_accumulation_steps") * fields.count("num_processes", 1)
        size = f"$(({rows * longest} / ROW_TOKENS))"
        fields.done.variables = ["ROW_TOKENS"]
        fields.becomes("packing", {"data.train_batch_size": size})
        fields.done.absent.append(
            f"--packing: a step has {rows} rows of {longest} tokens there, whole rows here; set "
            "ROW_TOKENS to the mean number of tokens of a row first, and a step has as many tokens"
        )


def _of_yaml(text: str) -> Flags:
    try:
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except (OmegaConfBaseException, ValueError) as error:
        raise ConfigError(f"the YAML could not be read: {error}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError("the YAML has no `field: value` lines.")
    given = {name: value for name, value in tree.items() if value is not None}
    given |= {"max_length": "null"} if tree.get("max_length", 0) is None else {}
    return {str(name): [as_text(value)] for name, value in given.items()}


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
    if not fields.is_on("packing"):
        fields.done.rename(told, {"data.train_batch_size": size})


def _preferences(fields: GivenFlags) -> None:
    """The loss, or the loss and SFT beside it."""
    losses = fields.value("loss_type").strip("[]").split(",")
    weights = fields.value("loss_weights").strip("[]").split(",")
    smoothing = fields.number("label_smoothing", 0.0)
    first = losses[0]
    settings: dict[str, Any] = {"loss": DPO_LOSSES.get(first, "dpo")}
    if first not in DPO_LOSSES:
        fields.done.refused.append(
            f"loss_type={first}: there are {', '.join(DPO_LOSSES)} and, here, kto"
        )
    if first == "sigmoid" and smoothing:
        settings["label_smoothing"] = smoothing
        fields.becomes("label_smoothing", settings)
    if losses[1:] == ["sft"]:
        of_dpo, of_sft = weights if len(weights) == 2 else ("1", "1")
        settings["sft_coef"] = float(of_sft) / float(of_dpo)
    elif len(losses) > 1:
        fields.done.refused.append(
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
        fields.done.refused.append(f"loss_type={kind}: there are {', '.join(LOSSES)}")
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
        fields.done.refused.append(
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
