"""A command of verl's in our settings: `main_ppo` and what goes by its keys, and SFT.

    done = translate(Command(["python3", "-m", "verl.trainer.main_ppo", "algorithm.gamma=1"]))

What becomes of a key of PPO's says `trainer.ppo.verl`, which `verl-like ppo` reads, too; of one of
SFT's `verl_sft.yaml`. A command that would be another experiment without a key is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from trainer.config.keys import leaf_keys
from trainer.config.settings import as_text, parse
from trainer.migrate.command import as_flags, find_program, last_name
from trainer.migrate.recorder import Command
from trainer.migrate.translation import Translation
from trainer.migrate.verl_sft import translate_sft
from trainer.ppo.config import PPOConfig
from trainer.ppo.verl import SAME_VALUES, fate_of, tables
from verl_like.errors import ConfigError

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
ENGINE = f"{ROLLOUT}.name"
SPLIT = "main_ppo_split"
"""The driver of verl's example of split placement."""
ONE_STEP_OFF, FULLY_ASYNC = "*one_step_off_policy*main_ppo", "*fully_async_main"
SFT = ("*fsdp_sft_trainer", "*sft_trainer", "*sft_trainer_ray")
BY_ITS_KEYS = ("*main_ppo", f"*{SPLIT}", "*main_dapo", "*main_entropy", ONE_STEP_OFF, FULLY_ASYNC)
"""Drivers whose experiment the keys say."""
OTHERS = ("verl.*main_*", "recipe.*main_*")
"""Drivers with code of their own."""
BASES = ("ppo_trainer", "ppo_megatron_trainer", "_self_")
OF_DRIVERS = ("dapo_trainer", "dapo_megatron_trainer", "one_step_off_*", "fully_async_ppo_*")
"""Configurations of drivers whose defaults the rules here know."""
DEFAULTS = {
    f"{ACTOR}.ppo_mini_batch_size": 256,
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "critic.model.enable_gradient_checkpointing": True,
    "trainer.logger": ["console", "wandb"],
    "trainer.n_gpus_per_node": 8,
    "trainer.total_epochs": 30,
}
SETTING = re.compile(r"\+{0,2}(?P<key>[\w./@-]+)=(?P<value>.*)", re.S)
"""With variables of the shell in it, as no parser of settings reads it."""
WITH_IMAGES = re.compile(r"(?i)(?<![a-z])(vl|vlm|vision|llava|omni|internvl)(?![a-z])")
"""Names of models that see."""
TENSOR_PARALLEL = f"{ROLLOUT}.tensor_model_parallel_size"
MEGATRON_AXES = ("tensor_model", "pipeline_model", "context")
OF_ALL_PROCESSES = (
    *(f"{ACTOR}.ppo_", "critic.ppo_", "reward_model."),
    *(f"{ROLLOUT}.log_prob_", "actor_rollout_ref.ref.log_prob_"),
)
SAME_ROWS = [f"{ACTOR}.ulysses_sequence_parallel_size"]
SAME_ROWS += [f"{ACTOR}.megatron.{axis}_parallel_size" for axis in MEGATRON_AXES]
"""How many processes have the same rows, along each axis."""
OLDER = {
    "reward.num_workers": "reward_model.num_workers",
    "reward.reward_kwargs": "reward_model.reward_kwargs",
    "reward.reward_manager.name": "reward_model.reward_manager",
    "reward.reward_model.model_path": "reward_model.model.path",
    "reward.reward_model": "reward_model",
    "reward.sandbox_fusion": "reward_model.sandbox_fusion",
}
"""Newer names, or beginnings of them -> older ones, which the tables have."""
TRACKERS = ("console", "tensorboard", "wandb", "mlflow")
MODULES = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
"""Megatron's names of layers -> those of transformers."""
LOSS, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
OVER_SEQUENCES = ("geo_mean", "sapo")
"""Losses that verl averages over sequences, whatever `loss_agg_mode` says."""
CHOOSES = (
    "tokens are chosen from a mini-batch by the old log-probs, there from each micro-batch by its"
)
DIFFERS = {
    "clip_cov": CHOOSES,
    "kl_cov": CHOOSES,
    "gspo": "older verl has seq-mean-token-mean, whatever loss_agg_mode says; set it for that",
    "geo_mean": "rollout_is weighs its tokens, there a sequence by their weights' geometric mean",
}
"""Loss -> what of it is never quite the same."""
CORRECTION = "algorithm.rollout_correction"


def translate(command: Command) -> Translation | None:
    """Settings, and a word on every key that is not the same; None of what is no training."""
    words = command.words
    known = (*SFT, *BY_ITS_KEYS, *OTHERS)
    found = find_program(words, lambda name: any(fnmatchcase(name, each) for each in known))
    if found is None:
        if not all(is_setting(word) for word in words):
            return None
        found = [], "main_ppo", words
    launcher, program, words = found
    if any(fnmatchcase(program, each) for each in SFT):
        done = translate_sft(last_name(program), launcher, given := _settings_of(words))
        refuse_images(given, "model.path", done)
        return done
    if not any(fnmatchcase(program, each) for each in BY_ITS_KEYS):
        raise ConfigError(
            f"{program} is a driver with code of its own, which nothing here stands for; known "
            "are main_ppo, main_ppo_split, main_dapo, main_entropy, fully_async_main, "
            "one_step_off_policy, and the SFT trainers. To sample and score without training "
            "there are verl-like best-of-n and eval."
        )

    done = Translation()
    folders = [Path(command.folder), Path(command.folder, *program.split(".")[:-1])]
    given = _of_its_configuration(words, folders, done) | _settings_of(words)
    refuse_images(given, "actor_rollout_ref.model.path", done)
    if fnmatchcase(program, FULLY_ASYNC) or fnmatchcase(program, ONE_STEP_OFF):
        _beside_training(given, done, fully=fnmatchcase(program, FULLY_ASYNC))
    elif last_name(program) == SPLIT:
        done.rename(f"{SPLIT}.py", {"placement": "split"})
    if given.get("trainer.resume_mode", "auto") != "resume_path":
        given.pop("trainer.resume_from_path", None)  # nothing reads it there
    _turns(given, done)
    _generated_batch(given, done)
    _micro_batches(given, done)
    _overlong_buffer(given, done)
    for key, value in given.items():
        _take(key, value, given, done)
    _rewards(given, done)
    _objective(given, done)
    _defaults(given, done)
    return done


def _defaults(given: Mapping[str, str], done: Translation) -> None:
    """Their defaults that are others here."""
    for key, theirs in DEFAULTS.items():
        done.default(key, theirs, {key: theirs})
    if done.settings.get(ENGINE) == "vllm":
        done.default(TENSOR_PARALLEL, 2, {TENSOR_PARALLEL: 2})
    by_tokens = f"{ACTOR}.use_dynamic_bsz"
    done.default(by_tokens, False, {by_tokens: False})
    lengths = ("data.max_prompt_length", "data.max_response_length")
    if all(given.get(key, "512").isdigit() for key in lengths):
        longest = sum(int(given.get(key, "512")) for key in lengths)
        for section, tokens in ((ACTOR, 16384), ("critic", 32768)):
            key = f"{section}.ppo_max_token_len_per_gpu"
            if longest <= tokens:
                done.default(key, tokens, {key: tokens})


def is_setting(word: str) -> bool:
    """Whether it is a setting, not a program."""
    return "." in word.partition("=")[0] and SETTING.fullmatch(word) is not None


def _settings_of(words: Sequence[str]) -> dict[str, str]:
    """Key -> value of the command's settings; other words are refused."""
    given = {}
    words = [word for word in words if word]
    for place, word in enumerate(words):
        if word.startswith("--config") or (
            place and words[place - 1] in ("--config-name", "--config-path")
        ):
            continue
        match = SETTING.fullmatch(word)
        if match is None:
            raise ConfigError(f"{word!r} is no setting `key=value`.")
        if not match["key"].startswith("hydra."):
            given[older(match["key"])] = match["value"]
    return given


def older(key: str) -> str:
    """The name that verl had for a key of rewards before it had a section of them."""
    theirs = next((start for start in OLDER if key == start or key.startswith(f"{start}.")), "")
    return OLDER[theirs] + key.removeprefix(theirs) if theirs else key


def _of_its_configuration(
    words: Sequence[str], folders: Sequence[Path], done: Translation
) -> dict[str, str]:
    """What the YAML of `--config-name` says beside verl's own."""
    flags = as_flags(words)
    name = "".join(flags.get("config-name", [])[:1]).removesuffix(".yaml")
    if not name or name in BASES or any(fnmatchcase(name, each) for each in OF_DRIVERS):
        return {}
    places = [*flags.get("config-path", [])[:1], *flags.get("config-dir", [])[:1], "config", "."]
    files = [Path(folder, place, f"{name}.yaml") for folder in folders for place in places]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ConfigError(
            f"--config-name {name}: there is no {files[0]}; call this where the script is run."
        )
    done.always.append(f"--config-name {name}: its keys are those of {file}")
    return _of_file(file)


def _of_file(file: Path) -> dict[str, str]:
    """The keys of a YAML, over those that it names in `defaults`."""
    try:
        tree = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except yaml.YAMLError as err:
        raise ConfigError(f"{file} cannot be read: {err}") from err
    given: dict[str, str] = {}
    for each in tree.pop("defaults", []):
        if each not in BASES:
            base = file.with_name(f"{each}.yaml") if isinstance(each, str) else file
            if base == file or not base.is_file():
                raise ConfigError(f"{file} is composed of {each}, which is not here.")
            given |= _of_file(base)
    tree.pop("hydra", None)
    return given | _flat(tree)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, str]:
    given: dict[str, str] = {}
    for name, value in tree.items():
        key = f"{above}{name}"
        if isinstance(value, Mapping) and value:
            given |= _flat(value, f"{key}.")
        else:
            given[older(key)] = as_text(value, key)
    return given


def _number(given: Mapping[str, str], key: str, default: float) -> float:
    text = given.get(key, str(default))
    try:
        return float(text)
    except ValueError:
        raise ConfigError(
            f"{key} is {text!r}: this figure is computed with others, so set its variable: "
            "NAME=... verl-like migrate verl SCRIPT."
        ) from None


def refuse_images(given: dict[str, str], path: str, done: Translation) -> None:
    """verl reads the images of rows unasked; the model says that there are some."""
    model = given.get(path, "")
    if WITH_IMAGES.search(model) and "data.image_key" not in given:
        done.refused.append(
            f"{path}={model}: models with images are not trained here, and verl reads the rows' "
            "column images unasked; where there are none say data.image_key=null"
        )


def _turns(given: dict[str, str], done: Translation) -> None:
    """With tools or an environment of ours among the settings, what verl says of its own goes."""
    section = f"{ROLLOUT}.multi_turn."
    if not {"environment", "environment.path", "tools", "environment.tools"} & given.keys():
        return
    if turns := given.pop(f"{section}max_assistant_turns", ""):
        done.rename(f"{section}max_assistant_turns {turns}", {"environment.max_turns": turns})
    for key in [key for key in given if key.startswith((section, f"{ROLLOUT}.agent."))]:
        done.absent.append(f"{key}={given.pop(key)}: environment.* says how turns go here")


def _generated_batch(given: dict[str, str], done: Translation) -> None:
    """DAPO draws batches of its own size until groups that differ fill one; so here."""
    drawn = given.pop("data.gen_batch_size", None)
    if drawn is None:
        return
    if given.get("algorithm.filter_groups.enable", "false").lower() == "true":
        done.absent.append(
            f"data.gen_batch_size={drawn}: data.train_batch_size prompts are drawn at a time, "
            "until groups that differ fill a batch"
        )
    elif drawn != given.get("data.train_batch_size", "1024"):
        done.refused.append(
            f"data.gen_batch_size={drawn}: a step has data.train_batch_size prompts; where nothing "
            "is filtered there it has these"
        )


def _micro_batches(given: dict[str, str], done: Translation) -> None:
    """Older keys count the rows of all processes."""
    for section in OF_ALL_PROCESSES:
        key = f"{section}micro_batch_size"
        if given.get(key, "null").lower() not in ("null", "none"):
            cards = _number(given, "trainer.n_gpus_per_node", 8)
            cards *= _number(given, "trainer.nnodes", 1)
            groups = max(cards // math.prod(_number(given, each, 1) for each in SAME_ROWS), 1)
            rows = max(int(_number(given, key, 1) // groups), 1)
            done.rename(f"{key} {given.pop(key)} of all processes", {f"{key}_per_gpu": rows})


def _overlong_buffer(given: dict[str, str], done: Translation) -> None:
    """dapo's reward manager is the punishment of length, where that is on."""
    section = "reward_model.reward_kwargs"
    longest = given.pop(f"{section}.max_resp_len", None)
    response = given.get("data.max_response_length", "512")
    is_on = given.get(f"{section}.overlong_buffer_cfg.enable", "false").lower() == "true"
    if longest is not None and is_on and longest != response:
        done.refused.append(
            f"{section}.max_resp_len={longest}: the punishment of length ends at "
            f"data.max_response_length, {response}"
        )
    given.pop(f"{section}.overlong_buffer_cfg.log", None)
    if given.get("reward_model.reward_manager") == "dapo":
        del given["reward_model.reward_manager"]
        done.always.append(
            "reward_model.reward_manager=dapo: functions are called one way; "
            "reward_model.overlong_buffer is its punishment of length"
        )


def _rewards(given: Mapping[str, str], done: Translation) -> None:
    """There a reward model's score stands alone."""
    if given.get("reward_model.enable", "false").lower() != "true":
        return
    alone = "reward_model.rule_weight"
    done.default("with a reward model, the weight of rules", 0, {alone: 0})
    done.absent.append(
        "the chat template of the reward model: it reads the actor's tokens, so take one on the "
        "actor's tokenizer, or ask it over HTTP (`rewards`, kind: remote)"
    )
    if "custom_reward_function.path" in given:
        done.refused.append(
            "custom_reward_function.path beside reward_model.enable: there the function asks the "
            "reward model's server; give both in `rewards`"
        )


def _beside_training(given: dict[str, str], done: Translation, *, fully: bool) -> None:
    """Generation on cards of its own: one maker, which is at most so many versions ahead."""
    done.program = "detached"
    pools: dict[str, list[int]] = {}
    for pool, section in (("trainer_pool", "trainer"), ("maker_0_pool", "rollout")):
        nodes = int(_number(given, f"{section}.nnodes", 1))
        pools[pool] = [int(_number(given, f"{section}.n_gpus_per_node", 8))] * nodes
    settings: dict[str, Any] = {f"resource_pool_spec.{pool}": pools[pool] for pool in pools}
    settings["detached.trainers"] = sum(pools["trainer_pool"])
    settings["trainer.nnodes"] = max(map(len, pools.values()))
    settings["trainer.n_gpus_per_node"] = pools["trainer_pool"][0] + pools["maker_0_pool"][0]
    done.rename("trainer.n_gpus_per_node, rollout.n_gpus_per_node", settings)
    for key in ("nnodes", "n_gpus_per_node"):
        given.pop(f"trainer.{key}", None)
        given.pop(f"rollout.{key}", None)
    given.pop("actor_rollout_ref.hybrid_engine", None)
    if not fully:
        done.rename("one_step_off_policy", {"detached.max_staleness": 1})
        given.setdefault(f"{CORRECTION}.bypass_mode", "True")
        return

    prompts = int(_number(given, f"{ACTOR}.ppo_mini_batch_size", 256))
    step = prompts * int(_number(given, "async_training.require_batches", 1))
    steps = int(_number(given, "async_training.trigger_parameter_sync_step", 4))
    stale = _number(given, "async_training.staleness_threshold", 0.1)
    samples = step * steps * int(_number(given, f"{ROLLOUT}.n", 1))
    settings = {"data.train_batch_size": step, "detached.update_steps": steps}
    settings["detached.max_staleness"] = max(math.ceil(stale), 1)
    settings["detached.limit"] = int(samples * (1 + stale))
    total = _number(given, "rollout.total_rollout_steps", 100)
    settings["trainer.total_training_steps"] = max(int(total // step), 1)
    if (every := int(_number(given, "rollout.test_freq", 1))) > 0:
        settings["trainer.test_freq"] = every * steps
    if given.get("async_training.partial_rollout", "True").lower() == "true":
        settings["detached.new_weights"] = "at_once"
    if "rollout.total_epochs" in given:
        settings["trainer.total_epochs"] = given["rollout.total_epochs"]
    done.rename("async_training.*, rollout.*", settings)
    takes_theirs = given.get("async_training.use_rollout_log_probs", "True").lower() == "true"
    given.setdefault(f"{CORRECTION}.bypass_mode", str(takes_theirs))
    given.pop("data.train_batch_size", None)
    for key in list(given):
        if key.startswith(("async_training.", "rollout.")) or key == "data.gen_batch_size":
            del given[key]


def _objective(given: Mapping[str, str], done: Translation) -> None:
    """What the loss is there, where the same words mean another one here."""

    def is_on(key: str) -> bool:
        return given.get(key, "").lower() not in ("", "false", "0", "0.0", "none", "null")

    loss, aggregation = given.get(LOSS, "vanilla"), given.get(AGGREGATION, "token-mean")
    if is_on(f"{CORRECTION}.bypass_mode") and loss != "vanilla":
        done.rename(
            f"{LOSS}={loss} under bypass_mode, which does not read it there", {LOSS: "vanilla"}
        )
        loss = "vanilla"
    if f"{ACTOR}.clip_ratio" in given:  # theirs is read where these two are null
        for key in (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"):
            done.default(key, 0.2, {key: 0.2})
    if loss == "kl_cov":
        weight = f"{ACTOR}.policy_loss.ppo_kl_coef"
        done.default(weight, 0.1, {weight: 0.1})

    over_sequences = "seq-mean-token-mean"
    if loss in OVER_SEQUENCES and aggregation != over_sequences:
        done.rename(f"{LOSS}={loss}, a mean over sequences there", {AGGREGATION: over_sequences})
        done.default(
            AGGREGATION, f"{aggregation} for values", {"critic.loss_agg_mode": aggregation}
        )
        if is_on(f"{ACTOR}.entropy_coeff") or is_on(f"{ACTOR}.use_kl_loss"):
            done.absent.append(
                f"{AGGREGATION}={aggregation} of entropy and KL: they are averaged as the loss"
            )
    if loss in DIFFERS and (loss != "geo_mean" or is_on(f"{CORRECTION}.rollout_is")):
        if loss != "gspo" or AGGREGATION not in given:
            done.absent.append(f"{LOSS}={loss}: {DIFFERS[loss]}")


def _take(key: str, value: str, given: Mapping[str, str], done: Translation) -> None:
    """What becomes of one key."""
    fate = fate_of(key, value, given)
    if fate is None:
        done.refused.append(f"{key}={value}: no such key is known here")
    elif fate.nothing:
        done.always.append(f"{key}={value}: {fate.nothing}")
    elif fate.refused:
        (done.absent if fate.lays_out else done.refused).append(f"{key}={value}: {fate.refused}")
    elif ".megatron." in key and (why := _no_axis(fate.key, value, given)):
        done.absent.append(f"{key}={value}: {why}")
    elif not value:
        done.refused.append(
            f"{key} is empty: the script has its value from a variable, an argument of its own or "
            "a program's answer; give it, NAME=... verl-like migrate verl SCRIPT ARGUMENTS"
        )
    elif "${" in value:
        done.refused.append(f"{key}={value}: give what it stands for")
    elif fate.key == ENGINE and value in ("sglang", "trtllm"):
        done.rename(f"{key} {value}", {ENGINE: "vllm"})
    elif fate.key.endswith(".strategy") and value in ("mindspeed", "veomni"):
        done.absent.append(f"{key}={value}: models are sharded by FSDP")
    elif fate.key == "trainer.device" and value == "npu":
        done.absent.append("trainer.device=npu: devices are CUDA's, or CPUs")
    elif fate.key == "trainer.logger":
        _trackers(value, done)
    elif fate.key.startswith(f"{ROLLOUT}.engine_kwargs."):
        if ".vllm." in key:
            done.settings[key] = value
        else:
            done.absent.append(f"{key}={value}: the engine is vLLM")
    else:
        ours = SAME_VALUES.get(fate.key, {}).get(value, value)
        if fate.key in ("trainer.test_freq", "trainer.save_freq") and ours in ("0", "False"):
            ours = "-1"
        if fate.key.endswith(".target_modules"):
            ours = re.sub(r"linear_\w+", lambda name: MODULES.get(name[0], name[0]), ours)
        if fate.key == key and ours == value:
            done.settings[key] = value
        else:
            done.rename(f"{key} {value}", {fate.key: ours})


def _no_axis(key: str, value: str, given: Mapping[str, str]) -> str:
    """Why ranks are not laid out so; the experiment is the same without."""
    section, _, axis = key.rpartition(".")
    if not value.isdigit():
        return f"{key} is a number: set its variable, NAME=... verl-like migrate verl SCRIPT"
    experts = given.get(f"{section.removesuffix('parallel')}megatron.expert_model_parallel_size")
    if axis == "tp" and value != "1" and experts not in (None, "1"):
        return f"{section}.ep={experts} keeps whole experts on their ranks, which tp would cut"
    return ""


def _trackers(value: str, done: Translation) -> None:
    """Trackers that are here; the others are dropped."""
    found = parse(f"x={value}").value()
    names = [str(name) for name in (found if isinstance(found, list) else [found])]
    done.settings["trainer.logger"] = f"[{','.join(name for name in names if name in TRACKERS)}]"
    done.absent += [
        f"trainer.logger {name}: trackers are {', '.join(TRACKERS)}, or your own by a dotted path"
        for name in names
        if name not in TRACKERS
    ]


def doc_rows() -> list[list[str]]:
    """(there, here) of verl's keys that are no keys here by the same name, for the docs."""
    fields = {key.rules.verl: key.name for key in leaf_keys(PPOConfig) if key.rules.verl}
    table = tables()

    def without(name: str) -> str:
        lays_out = any(fnmatchcase(name, each) for each in table.lays_out)
        return "dropped" if lays_out else "not here"

    here = {name: f"`{ours}`" for name, ours in {**fields, **table.renamed}.items()}
    here |= {name: f"changes nothing: {why}" for name, why in table.changes_nothing.items()}
    for name, row in table.changes_nothing_at.items():
        listed = ", ".join(f"`{value}`" for value in row["at"])
        here[name] = f"changes nothing at {listed}; else {without(name)}: {row['else']}"
    for name, like in table.as_the_actors.items():
        section = like["actor"].rpartition(".")[0]
        here[name] = f"changes nothing at the actor's value; else not here: set it in `{section}`"
    here |= {name: f"{without(name)}: {way_out}" for name, way_out in table.not_here.items()}
    for name in table.lays_out:
        if name not in here and (fate := fate_of(name.replace("*", "x"), "any", {})):
            here[name] = f"dropped: {fate.refused}"
    return sorted([f"`{name}`", text] for name, text in here.items())
