"""Run `verl-like migrate` on all examples in checkouts of verl, OpenRLHF or TRL.

    python benchmarks/migrate_examples.py FOLDER [FOLDER ...] [--only PATTERN] [--start]

With --start, `verl-like check --rehearse` runs two small steps of every translated command, with
the tiny models and rows of `example_stand_ins.py`. This takes a minute per command.

The script prints a line for every example, and how many have each outcome, by what they need:

- loads: `verl-like migrate` rejects it, but `verl-like ppo` takes its arguments as they are;
- translated: every training in it becomes a command that composes here; for verl, its sizes, rates,
  losses and lengths equal those that verl's Hydra composes from the same arguments, and bash
  can read what is printed;
- starts: with --start, the translated commands also pass their rehearsal (a script whose settings
  are left to the user is not rehearsed);
- stops: with --start, `check` or the rehearsal rejects a command, for the reason in the line;
- rejected: `verl-like migrate` rejects it, for the reason in the line;
- not recognized: it has no training that `verl-like migrate` recognizes;
- wrong: a value differs from verl's.

TRL's examples are Python files; the commands in their docstrings are used. A script that needs
arguments gets `8 saved`. `ENVIRONMENT` has the variables that scripts need: those of a scheduler
with one node of eight GPUs, and others that the script asks its user to set.
"""

from __future__ import annotations

import argparse
import logging
import math
import multiprocessing
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from example_stand_ins import with_stand_ins
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from tests.forked import run_program
from trainer.cli.check import main as main_of_check
from trainer.config.compose import load_config
from trainer.config.unused_keys import unused_reason
from trainer.ppo.recipe import PPO
from trainer.tools.migrate.recorder import docstring_commands, record
from trainer.tools.migrate.systems import RECIPES, migrate
from trainer.tools.migrate.translation import Translation
from verl_like.errors import ConfigError

ENVIRONMENT = {
    **{"INFER_BACKEND": "vllm", "LORA_ADAPTER_PATH": "adapter", "CKPT_DIR": "checkpoints"},
    **{"SLURM_JOB_NUM_NODES": "1", "SLURM_NNODES": "1", "SLURM_GPUS_PER_NODE": "8"},
    **{"SLURM_CPUS_PER_TASK": "16", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},
    **{"ARNOLD_WORKER_NUM": "1", "ARNOLD_WORKER_GPU": "8"},
}
PRELOADED = [
    *("tests.rare_collections", "tests.foreign_functions", "peft"),
    *("workers.training.build_model", "tests.frozen"),
    *("trainer.cli.check", "trainer.tools.rehearsal"),
]
"""Modules that the processes of a rehearsal have from the start."""
MAX_WORDS = 400
MAIN_PPO = "verl.trainer.main_ppo"
ARGUMENTS = ("8", "saved")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
SAME = [
    *("data.train_batch_size", "data.max_prompt_length", "data.max_response_length"),
    *("data.truncation", "data.shuffle", "data.filter_overlong_prompts", "data.prompt_key"),
    f"{ACTOR}.ppo_mini_batch_size",
    f"{ACTOR}.ppo_epochs",
    f"{ACTOR}.use_dynamic_bsz",
    f"{ACTOR}.optim.lr",
    f"{ACTOR}.optim.weight_decay",
    f"{ACTOR}.optim.betas",
    f"{ACTOR}.clip_ratio_c",
    f"{ACTOR}.use_kl_loss",
    f"{ACTOR}.kl_loss_coef",
    f"{ACTOR}.kl_loss_type",
    f"{ACTOR}.entropy_coeff",
    f"{ACTOR}.policy_loss.loss_mode",
    f"{ROLLOUT}.n",
    f"{ROLLOUT}.temperature",
    f"{ROLLOUT}.top_p",
    f"{ROLLOUT}.top_k",
    *("critic.optim.lr", "critic.cliprange_value"),
    *("algorithm.adv_estimator", "algorithm.gamma", "algorithm.lam"),
    *("algorithm.norm_adv_by_std_in_grpo", "algorithm.use_kl_in_reward", "algorithm.kl_penalty"),
    *("algorithm.kl_ctrl.type", "algorithm.kl_ctrl.kl_coef"),
    *("trainer.total_epochs", "trainer.total_training_steps", "trainer.critic_warmup"),
    *("trainer.nnodes", "trainer.n_gpus_per_node", "trainer.test_freq", "trainer.save_freq"),
]
"""Keys that have the same name in both; keys that the run does not read are not compared."""
SFT_KEYS = {
    "data.train_batch_size": "data.train_batch_size",
    "data.max_length": "data.max_length",
    "optim.lr": "optim.lr",
    "optim.betas": "optim.betas",
    "optim.weight_decay": "optim.weight_decay",
    "optim.clip_grad": "grad_clip",
    "trainer.total_epochs": "trainer.total_epochs",
    "trainer.total_training_steps": "trainer.total_training_steps",
    "trainer.seed": "trainer.seed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--only", default="", help="pattern of the paths of scripts")
    parser.add_argument("--start", action="store_true", help="rehearse the translated commands")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
    forkserver.ensure_running()  # before `chdir`, because peers have a package `tests`, too
    os.environ |= ENVIRONMENT
    for folder in options.folders:
        with tempfile.TemporaryDirectory(prefix="examples_") as stand_ins:
            count(folder.resolve(), options.only, Path(stand_ins) if options.start else None)


def count(folder: Path, only: str, stand_ins: Path | None) -> None:
    """Print the outcome of every example in a checkout, and their counts."""
    os.chdir(folder)
    system = next(name for name in ("verl", "openrlhf", "trl") if (folder / name).is_dir())
    counts: Counter[tuple[str, str]] = Counter()
    for name, source in sources(system, folder):
        if re.search(only, name):
            os.chdir((folder / name).parent if system == "openrlhf" else folder)
            kind, words, done = outcome(system, source)
            need = needs(name, source, done)
            if stand_ins and kind == "translated" and need != "own code":
                kind, words = started(done, folder, stand_ins)
            counts[need, kind] += 1
            print(f"{kind:15} {need:10} {name}: {words}", flush=True)
    print(f"{system}: {sum(counts.values())} examples")
    for need in sorted({need for need, _ in counts}):
        kinds = {kind: number for (other, kind), number in counts.items() if other == need}
        listed = ", ".join(f"{number} {kind}" for kind, number in kinds.items())
        print(f"  {need} {sum(kinds.values())}: {listed}")


NEEDS = {
    "engine": r"(?i)megatron|veomni|torchtitan|automodel|mindspeed|deepspeed_legacy",
    "elsewhere": r"fsdp_turbo|(openr1mm|tinyllava_video_r1)\.py|recipe/minicpmo|main_ppo_sync",
    "video": r"data\.video_key",
    "method": r"scripts/(bco|distillation|gkd|gold|nash_md|online_dpo|online_dpo_vlm|prm|sdft|sdpo"
    r"|sft_diffusion_gemma|ssd|ssd_eval|tpo|xpo)\.py",
    "own code": r"main_generation|recipe\.\w+\.main|main_eval|sft_gemma3|rloo\.py$|\s\.\.\.(\s|$)"
    r"|ckpt_ds_zero|docker|serve_remote_rm|train_ppo_ray_slurm",
    "tools": r"(?i)multi_turn\.(enable|tool)|agent_loop|tool_config_path|agent_func|environment"
    r"|grpo_agent",
    "images": r"(?i)image_key|images|[_/-]vl[_\W]|vlm|minicpm_o|glm4_1v",
}
"""What an example needs besides FSDP and texts -> a pattern of its name or its lines.

`elsewhere` is code that is not in the repository, `method` an objective that does not exist here,
`own code` is no training, or a training whose settings are code or left to the user.
"""


def needs(name: str, source: str, translations: Sequence[Translation]) -> str:
    """Return what an example needs, or "text" if FSDP and rows of texts are enough."""
    text = Path(source).read_text(encoding="utf-8") if os.path.isfile(source) else source
    if translations:
        text = "\n".join(word for done in translations for word in done.source)
    lines = [name, *(line for line in text.splitlines() if not line.lstrip().startswith("#"))]
    matching = (need for need, pattern in NEEDS.items() if re.search(pattern, "\n".join(lines)))
    return next(matching, "text")


def loads(source: str, arguments: Sequence[str]) -> bool:
    """Return whether `verl-like ppo` composes every command of verl's PPO in a script."""
    commands = [command.words for command in record(source, arguments).commands]
    trained = [words for words in commands if MAIN_PPO in words]
    try:
        for words in trained:
            settings = words[words.index(MAIN_PPO) + 1 :]
            load_config([word for word in settings if "$" not in word], PPO)
    except ConfigError:
        return False
    return bool(trained)


def sources(system: str, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name, and the file or text, of every example."""
    if system != "trl":
        for path in sorted([*folder.glob("examples/**/*.sh"), *folder.glob("recipe/**/*.sh")]):
            name = str(path.relative_to(folder))
            yield name, str(path)
        return
    for path in sorted([*folder.glob("examples/scripts/*.py"), *folder.glob("trl/scripts/*.py")]):
        for number, command in enumerate(docstring_commands(path.read_text(encoding="utf-8"))):
            yield f"{path.relative_to(folder)}[{number}]", command
    for path in sorted(folder.glob("examples/cli_configs/*.yaml")):
        yield str(path.relative_to(folder)), f"trl sft --config {path}"


def outcome(system: str, source: str) -> tuple[str, str, list[Translation]]:
    """Return the outcome for an example, its explanation, and its translations."""
    arguments: Sequence[str] = ()
    try:
        try:
            results = migrate(system, source)
        except ConfigError as err:
            if "Usage" not in str(err):
                raise
            arguments = ARGUMENTS
            results = migrate(system, source, arguments)
    except ConfigError as err:
        words = " ".join(str(err).split("\n\nverl-like")[0].split())
        if system == "verl" and loads(source, arguments):
            return "loads", words[:MAX_WORDS], []
        has_no_training = words.startswith(("there is no command", "the script starts no program"))
        kind = "not recognized" if has_no_training else "rejected"
        return kind, words[:MAX_WORDS], []
    for done in results:
        subprocess.run(["bash", "-n", "-c", done.report()], check=True)

    programs = f"{', '.join(done.program for done in results)}"
    explanation = f"{programs}{' with arguments' if arguments else ''}"
    if system == "verl":
        try:
            wrong = [line for done in results for line in differences(done)]
        except (HydraException, OmegaConfBaseException) as err:
            return (
                "translated",
                f"{explanation}; verl rejects it: {str(err).split(chr(10))[0]}",
                results,
            )
        if wrong:
            return "wrong", "; ".join(wrong), results
    return "translated", explanation, results


def started(translations: Sequence[Translation], peer: Path, stand_ins: Path) -> tuple[str, str]:
    """Rehearse translated commands of a checkout; return the outcome and its explanation."""
    environment = {
        "PEER": os.getcwd(),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(stand_ins / "cache"),
    }
    for done in translations:
        gpus = [
            done.settings.get(key, "1") for key in ("trainer.nnodes", "trainer.n_gpus_per_node")
        ]
        number = math.prod(int(text) for text in gpus)
        words = [*with_stand_ins(done, stand_ins), "--rehearse", "--gpus", f"{number}xH100"]
        theirs = dict(pair.partition("=")[::2] for pair in shlex.split(" ".join(done.environment)))
        result = run_program(check, *words, folder=stand_ins, **{**theirs, **environment})
        shutil.rmtree(stand_ins / "run", ignore_errors=True)
        if result.returncode or "Rehearsal: passed" not in result.stdout:
            text = " ".join((result.stderr or result.stdout).split())
            start = text.rfind("error: ") if "error: " in text else -MAX_WORDS
            return "stops", text[start:][:MAX_WORDS]
    return "starts", ", ".join(done.program for done in translations)


def check() -> None:
    """Run `verl-like check` with the arguments of this process, in whose path the peer is."""
    sys.path.append(os.environ["PEER"])
    main_of_check(sys.argv[1:])


def differences(done: Translation) -> list[str]:
    """Return the keys whose values differ from those that verl composes, or raise its error."""
    recipe = RECIPES[done.program]
    settings = [text for text in done.overrides() if "$" not in text]
    absent = [text.partition("=")[0] for text in done.overrides() if "$" in text]
    ours = load_config(
        [], recipe, defaults=[*settings, *(f"{k}=PATH" for k in absent if is_path(k))]
    )
    theirs = composed(done.source)
    pairs = of_sft(theirs, ours) if done.program == "sft" else of_ppo(theirs, ours)
    lines = []
    for key, (there, here) in pairs.items():
        is_compared = here is not None and key not in absent and is_read(ours, key)
        if is_compared and not is_same(there, here):
            lines.append(f"{key} is {there} there, {here} here")
    return lines


def is_read(ours: Any, key: str) -> bool:
    return unused_reason(ours, key.partition(" ")[0]) is None


def is_path(key: str) -> bool:
    return key.endswith(("_files", ".path", "_dir", "_name"))


def composed(words: Sequence[str]) -> Any:
    """Return verl's configuration for a command."""
    driver = next(word for word in words if re.search(r"(main_\w+|trainer)(\.py)?$", word))
    names = {"fsdp_sft_trainer": "sft_trainer", "sft_trainer": "sft_trainer_engine"}
    name = names.get(driver.rpartition(".")[2], "ppo_trainer")
    overrides, folder, rest = (
        [],
        Path("verl/trainer/config"),
        iter(words[words.index(driver) + 1 :]),
    )
    for word in rest:
        flag, has_value, value = word.partition("=")
        if flag in ("--config-name", "--config-path"):
            value = value if has_value else next(rest)
            if flag == "--config-name":
                name = value.removesuffix(".yaml")
            elif Path(value).is_dir() and Path(value).is_absolute():
                folder = Path(value)
        else:
            overrides.append(word)
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(folder.resolve()), version_base=None):
        config = compose(name, overrides)
    OmegaConf.set_struct(config, False)
    return config


def value_of(config: Any, key: str) -> Any:
    for name in key.split("."):
        config = config.get(name) if hasattr(config, "get") else getattr(config, name)
    return OmegaConf.to_container(config) if OmegaConf.is_config(config) else config


def of_ppo(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Return key -> (verl's value, our value)."""
    pairs = {key: (value_of(theirs, key), value_of(ours, key)) for key in SAME}
    gpus = int(theirs.trainer.nnodes) * int(theirs.trainer.n_gpus_per_node)
    actor = theirs.actor_rollout_ref.actor
    sharding = next(actor[name] for name in ("fsdp_config", "megatron", "veomni") if name in actor)
    names = ("context_parallel_size", "ulysses_parallel_size", "ulysses_sequence_parallel_size")
    sequence_parallel = max(part.get(name, 1) for part in (actor, sharding) for name in names)
    axes = {"pp": "pipeline_model_parallel_size", "ep": "expert_model_parallel_size"}
    for axis, name in axes.items():
        here = value_of(ours, ACTOR).parallel.get(axis, 1)
        pairs[f"{ACTOR}.parallel.{axis}"] = sharding.get(name, here), here
    for section in (ACTOR, "critic"):
        for name in ("ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu"):
            here, there = value_of(ours, f"{section}.{name}"), value_of(theirs, f"{section}.{name}")
            rows = value_of(theirs, f"{section}.ppo_micro_batch_size")
            if name.startswith("ppo_micro") and rows:
                there = rows // (gpus // sequence_parallel) or 1
            if name.startswith("ppo_max") and section == ACTOR:
                there *= sequence_parallel // value_of(ours, ACTOR).parallel.get("sp", 1) or 1
            pairs[f"{section}.{name}"] = there, here
        for name in ("lr_warmup_steps", "lr_warmup_steps_ratio"):
            there = value_of(theirs, f"{section}.optim.{name}")
            here = value_of(ours, f"{section}.optim.{name}")
            pairs[f"{section}.optim.{name}"] = there, here
        rates = value_of(theirs, f"{section}.optim")
        least = rates.get("min_lr", rates.get("lr_min", 0.0)) / (rates["lr"] or 1)
        key = f"{section}.optim.min_lr_ratio"
        pairs[key] = round(rates.get("min_lr_ratio") or least, 10), value_of(ours, key)
        share = pairs[f"{section}.optim.lr_warmup_steps_ratio"][0]
        if "lr_start" in rates:  # VeOmni reads only the ratio
            del pairs[f"{section}.optim.lr_warmup_steps"]
        elif pairs[f"{section}.optim.lr_warmup_steps"] == (-1, 0) and not share:
            del pairs[f"{section}.optim.lr_warmup_steps"]  # absent in both
    for side in ("low", "high"):
        bounds = [value_of(config, f"{ACTOR}.clip_ratio_{side}") for config in (theirs, ours)]
        either = [value_of(config, f"{ACTOR}.clip_ratio") for config in (theirs, ours)]
        there, here = (
            both if bound is None else bound for bound, both in zip(bounds, either, strict=True)
        )
        pairs[f"{ACTOR}.clip_ratio ({side})"] = there, here
    there = pairs[f"{ACTOR}.policy_loss.loss_mode"][0]
    aggregation = value_of(theirs, f"{ACTOR}.loss_agg_mode")
    if there in ("sapo", "geo_mean"):  # verl uses means over sequences, whatever the key says
        aggregation = "seq-mean-token-mean"
    pairs[f"{ACTOR}.loss_agg_mode"] = aggregation, value_of(ours, f"{ACTOR}.loss_agg_mode")
    optim = theirs.actor_rollout_ref.actor.optim
    schedule = optim.get("warmup_style") or optim.get("lr_scheduler_type") or optim.lr_decay_style
    pairs[f"{ACTOR}.optim.lr_scheduler_type"] = (
        schedule,
        ours.actor_rollout_ref.actor.optim.lr_scheduler_type,
    )
    clip = theirs.actor_rollout_ref.actor.get("grad_clip", optim.clip_grad)
    clip = clip if optim.clip_grad == 1.0 else optim.clip_grad
    pairs[f"{ACTOR}.grad_clip"] = clip, ours.actor_rollout_ref.actor.grad_clip
    return pairs


def of_sft(theirs: Any, ours: Any) -> dict[str, tuple[Any, Any]]:
    """Return key -> (verl's value, our value)."""
    pairs = {
        here: (value_of(theirs, there), value_of(ours, here)) for there, here in SFT_KEYS.items()
    }
    optim = theirs.optim
    schedule = (
        optim.get("lr_scheduler")
        or optim.get("warmup_style")
        or optim.get("lr_scheduler_type")
        or optim.get("lr_decay_style")
    )
    pairs["optim.lr_scheduler_type"] = schedule, ours.optim.lr_scheduler_type
    share = value_of(theirs, "optim.lr_warmup_steps_ratio")
    pairs["optim.lr_warmup_steps_ratio"] = share, ours.optim.lr_warmup_steps_ratio
    rows = theirs.data.get("micro_batch_size")
    there = rows // int(ARGUMENTS[0]) or 1 if rows else theirs.data.micro_batch_size_per_gpu
    pairs["data.micro_batch_size_per_gpu"] = there, ours.data.micro_batch_size_per_gpu
    return pairs


def is_same(there: Any, here: Any) -> bool:
    if isinstance(there, (list, tuple)):
        return [float(x) for x in there] == [float(x) for x in here]
    try:
        return float(there) == float(here)
    except (TypeError, ValueError):
        return str(there).lower() == str(here).lower()


if __name__ == "__main__":
    main()
