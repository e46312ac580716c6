"""A script, a command line or a YAML for TRL's `grpo`, `sft`, `reward` or `dpo`, in our settings.

The tables of `trainer.migrate.trl.flags` say what one field becomes; here is what takes several
together, `trainer.migrate.trl.grpo` has the algorithm.
"""

from __future__ import annotations

from trainer.migrate.translation import Translation
from trainer.migrate.trl.flags import PROGRAMS
from trainer.migrate.trl.given import GivenFields
from trainer.migrate.trl.grpo import grpo
from trainer.migrate.trl.read import read
from verl_like.errors import ConfigError

SCHEDULES = {
    "constant": "constant",
    "constant_with_warmup": "constant",
    "cosine": "cosine",
    "linear": "linear",
    "warmup_stable_decay": "wsd",
}
DPO_LOSSES = {"sigmoid": "dpo", "hinge": "hinge", "ipo": "ipo"}
LORA = ("lora_r", "lora_alpha", "lora_target_modules")


def translate(text: str) -> Translation:
    """Settings, and a word on every field."""
    program, values = read(text)
    fields = GivenFields(program, values)
    done = Translation(program=PROGRAMS[program])
    for section in (_data, _model, _lora, _optimizer, _run):
        section(fields, done)
    if program == "grpo":
        grpo(fields, done)
    else:
        _rows(fields, done)
    if program == "dpo":
        _preferences(fields, done)
    fields.tell_the_rest(done)
    return done


def _data(fields: GivenFields, done: Translation) -> None:
    """A data set of the hub, or a file."""
    name = fields.value("dataset_name", "")
    config = fields.value("dataset_config", "")
    splits = (
        fields.value("dataset_train_split", "train"),
        fields.value("dataset_test_split", "test"),
    )
    every = fields.value("eval_steps", fields.value("logging_steps", "500"))
    validates = fields.value("eval_strategy", "no") != "no"
    if not name:
        return
    place = f"hub://{name}/{config}" if config else f"hub://{name}"
    if "/" not in name or name.startswith(("/", ".", "$")):
        place = name
    files = [f"{place}:{split}" if place.startswith("hub:") else place for split in splits]
    fields.becomes(done, "dataset_name", {"data.train_files": files[0]})
    if validates:
        settings = {"data.val_files": files[1], "trainer.test_freq": every}
        fields.becomes(done, "eval_strategy", settings)


def _model(fields: GivenFields, done: Translation) -> None:
    for name in ("dtype", "torch_dtype"):
        if fields.value(name, "float32") in ("float32", "auto"):
            done.joined += [f"{name}={fields.value(name, '')}"] if fields.has(name) else []
        else:
            fields.becomes(done, name, {fields.place("model.dtype"): fields.value(name, "")})
    if fields.program == "reward":
        done.always.append("a head of one number: the recipe says it")


def _lora(fields: GivenFields, done: Translation) -> None:
    """Adapters, with TRL's sizes."""
    if fields.value("use_peft", "False").lower() != "true":
        fields.ignore("use_peft", *LORA)
        return
    rank, alpha = fields.value("lora_r", "16"), fields.value("lora_alpha", "32")
    settings = {fields.place("model.lora_rank"): rank, fields.place("model.lora_alpha"): alpha}
    modules = fields.value("lora_target_modules", "")
    if modules:
        listed = modules if modules.startswith("[") or modules == "all-linear" else None
        listed = listed or f"[{','.join(modules.split())}]"
        settings[fields.place("model.target_modules")] = listed
    fields.becomes(done, "use_peft", settings)
    fields.ignore(*LORA)


def _optimizer(fields: GivenFields, done: Translation) -> None:
    optimizer = fields.value("optim", "adamw_torch")
    if not optimizer.startswith("adamw_torch"):
        done.absent.append(f"optim={optimizer}: AdamW is taken; optim.optimizer names a class")
    schedule = fields.value("lr_scheduler_type", "linear")
    if schedule not in SCHEDULES:
        done.absent.append(f"lr_scheduler_type={schedule}: there are {', '.join(SCHEDULES)}")
    ours = {fields.place("optim.lr_scheduler_type"): SCHEDULES.get(schedule, "linear")}
    fields.becomes(done, "lr_scheduler_type", ours)
    done.default("lr_scheduler_type", "linear", ours)

    betas = fields.value("adam_beta1", "0.9"), fields.value("adam_beta2", "0.999")
    settings = {fields.place("optim.betas"): list(betas)}
    for name in ("adam_beta1", "adam_beta2"):
        fields.becomes(done, name, settings)
    _warm_up(fields, done)


def _warm_up(fields: GivenFields, done: Translation) -> None:
    """Steps, or a share of all steps; a number below 1 of `warmup_steps` is a share."""
    share = fields.number("warmup_ratio", 0.0)
    steps = fields.number("warmup_steps", 0.0)
    name, share = ("warmup_steps", steps) if 0 < steps < 1 else ("warmup_ratio", share)
    if steps >= 1:
        fields.becomes(done, "warmup_steps", {fields.place("optim.lr_warmup_steps"): int(steps)})
    elif share > 0:
        settings: dict[str, object] = {fields.place("optim.lr_warmup_steps"): -1}
        settings[fields.place("optim.lr_warmup_steps_ratio")] = share
        fields.becomes(done, name, settings)


def _run(fields: GivenFields, done: Translation) -> None:
    if fields.value("num_processes", "1") != "1":
        processes = fields.value("num_processes", "1")
        done.rename("num_processes", [processes], {"trainer.n_gpus_per_node": processes})

    epochs = fields.number("num_train_epochs", 3.0)
    if epochs != int(epochs):
        raise ConfigError(
            f"num_train_epochs={epochs:g}: epochs are whole here; set max_steps, or round it."
        )
    if fields.has("num_train_epochs"):
        fields.becomes(done, "num_train_epochs", {"trainer.total_epochs": int(epochs)})
    done.default("num_train_epochs", 3, {"trainer.total_epochs": 3})

    steps = fields.count("max_steps", -1)
    if steps > 0 and fields.program != "grpo":
        fields.becomes(done, "max_steps", {"trainer.total_training_steps": steps})

    trackers = fields.value("report_to", "none").strip("[]").replace(" ", ",").split(",")
    known = [name for name in trackers if name in ("wandb", "tensorboard", "mlflow")]
    fields.becomes(done, "report_to", {"trainer.logger": ["console", *known]})

    if fields.value("save_strategy", "steps") == "steps":
        settings = {"trainer.save_freq": fields.value("save_steps", "500")}
        fields.becomes(done, "save_steps", settings)
        done.default("save_steps", 500, settings)
    else:
        fields.ignore("save_steps")

    resumed = fields.value("resume_from_checkpoint", "")
    if resumed and resumed.lower() not in ("true", "false"):
        settings = {"trainer.resume_mode": "resume_path", "trainer.resume_from_path": resumed}
        fields.becomes(done, "resume_from_checkpoint", settings)


def _rows(fields: GivenFields, done: Translation) -> None:
    """Rows of an optimizer step, over all processes."""
    rows = fields.count("per_device_train_batch_size", 8)
    accumulated = fields.count("gradient_accumulation_steps", 1)
    size = rows * accumulated * fields.count("num_processes", 1)
    told = f"per_device_train_batch_size={rows}, gradient_accumulation_steps={accumulated}"
    done.rename(told, [], {"data.train_batch_size": size})
    if fields.value("completion_only_loss", "").lower() == "false":
        fields.becomes(done, "completion_only_loss", {"data.loss_on": "all"})


def _preferences(fields: GivenFields, done: Translation) -> None:
    """The loss, or the loss and SFT beside it."""
    losses = fields.value("loss_type", "sigmoid").strip("[]").split(",")
    weights = fields.value("loss_weights", "").strip("[]").split(",")
    smoothing = fields.number("label_smoothing", 0.0)
    first = losses[0]
    settings: dict[str, object] = {"loss": DPO_LOSSES.get(first, "dpo")}
    if first not in DPO_LOSSES:
        done.absent.append(f"loss_type={first}: there are {', '.join(DPO_LOSSES)} and, here, kto")
    if first == "sigmoid" and smoothing:
        settings = {"loss": "cdpo", "label_smoothing": smoothing}
        fields.becomes(done, "label_smoothing", settings)
    if losses[1:] == ["sft"]:
        of_dpo, of_sft = weights if len(weights) == 2 else ("1", "1")
        settings["sft_coef"] = float(of_sft) / float(of_dpo)
    elif len(losses) > 1:
        done.absent.append(f"loss_type={','.join(losses)}: one loss, and SFT beside it: sft_coef")
    fields.becomes(done, "loss_type", settings)
