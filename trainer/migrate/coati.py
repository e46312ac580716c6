"""A command of ColossalChat's `train_prompts.py`, or of a script with makers and trainers.

The maths is `algorithm=coati_legacy`. `train_prompts.py` becomes `verl-like ppo` on one pool, the
others `verl-like detached`. `coati.yaml` says what one flag becomes; the rules here take several
flags together.
"""

from __future__ import annotations

from typing import Any

from trainer.migrate.command import as_flags, last_name, num_processes, program_or_flags
from trainer.migrate.given import GivenFlags
from trainer.migrate.recorder import Command
from trainer.migrate.table import Table
from trainer.migrate.translation import Translation
from workers.config.model import STRATEGIES_ELSEWHERE

ACTOR = "actor_rollout_ref.actor"
ONE_GROUP = ("train_prompts",)
DETACHED = ("1mmt_prompt", "mmmt_prompt", "1mmt_dummy", "mmmt_dummy")
"""The scripts: `PPOTrainer` in one group of processes; `DetachedPPOTrainer` on Ray."""
MARKS = ("num_makers", "num_trainers", "experience_steps", "trainer_strategy")
"""Flags by which a command line without its script is one of makers and trainers."""
PROMPT_LENGTH = 96
WHOLE_LENGTH = {"ppo": 128, "detached": 512}
"""What the scripts cut prompts to, and prompt and response together."""


def translate(command: Command) -> Translation | None:
    """Settings, and a word on every flag; None of what is no training."""
    scripts = (*ONE_GROUP, *DETACHED)
    found = program_or_flags(command.words, lambda name: last_name(name) in scripts)
    if found is None:
        return None
    launcher, script, words = found
    script, given = last_name(script), as_flags(words)
    is_detached = script in DETACHED or (not script and any(mark in given for mark in MARKS))
    done = Translation("detached" if is_detached else "ppo", settings={"algorithm": "coati_legacy"})
    flags = GivenFlags(Table("coati"), given, "ColossalChat's PPO scripts have no flag", done)
    if is_detached:
        _makers_and_trainers(flags, one_maker=script.startswith("1mmt"))
    else:
        processes = num_processes(launcher)
        _one_group(flags, int(processes) if processes.isdigit() else 1)
    _lengths(flags)
    for name in ("strategy", "trainer_strategy"):
        ours = STRATEGIES_ELSEWHERE.get(flags.value(name), flags.value(name))
        flags.becomes(name, {f"{ACTOR}.strategy": ours, "critic.strategy": ours})
    done.default("Adam's weight decay", 0, {f"{ACTOR}.optim.weight_decay": 0})
    return flags.finish()


def _one_group(flags: GivenFlags, processes: int) -> None:
    """A step is the experience of `update_timesteps` batches, which every process makes anew."""
    done = flags.done
    experience, train = flags.count("experience_batch_size", 8), flags.count("train_batch_size", 8)
    collected = flags.count("num_collect_steps", flags.count("update_timesteps", 10))
    # the later script has one update an episode
    steps = collected if flags.has("num_collect_steps") else flags.count("max_timesteps", 10)
    episodes = flags.count("num_episodes", 10)
    prompts = experience * collected * processes
    told = (
        f"--num_episodes {episodes} of {steps} timesteps, an update every {collected}, "
        f"--experience_batch_size {experience}"
    )
    total = max(episodes * steps // collected, 1)
    done.rename(told, {"data.train_batch_size": prompts, "trainer.total_training_steps": total})
    size = {f"{ACTOR}.ppo_mini_batch_size": min(train * processes, prompts)}
    done.rename(f"--train_batch_size {train} of every process", size)
    epochs = flags.count("num_update_steps", flags.count("max_epochs", 1))
    done.rename("--max_epochs, --num_update_steps", {f"{ACTOR}.ppo_epochs": epochs})
    done.settings["trainer.n_gpus_per_node"] = str(processes)
    coef = flags.number("ptx_coef", 0.9)
    if flags.has("pretrain_dataset") and coef < 1:
        done.rename(f"--ptx_coef {coef:g}", {"ptx.coef": f"{coef / (1 - coef):.6g}"})


def _makers_and_trainers(flags: GivenFlags, *, one_maker: bool) -> None:
    """A batch of every trainer rank is one of ours; their number follows from what is made."""
    done = flags.done
    makers = 1 if one_maker else flags.count("num_makers", 1)
    trainers, train = flags.count("num_trainers", 1), flags.count("train_batch_size", 8)
    made = flags.count("experience_batch_size", 8) * flags.count("experience_steps", 4) * makers
    settings: dict[str, Any] = {"detached.makers": makers, "detached.trainers": trainers}
    done.rename("--num_makers, --num_trainers", settings)
    batch = train * trainers
    settings = {"data.train_batch_size": batch, f"{ACTOR}.ppo_mini_batch_size": batch}
    done.rename(f"--train_batch_size {train} of every trainer", settings)
    # a batch that comes again is another step here
    steps = max(made // batch, 1) * flags.count("train_epochs", 1)
    told = "--experience_batch_size, --experience_steps, --train_epochs"
    done.rename(told, {"trainer.total_training_steps": steps})
    done.default("--update_steps", 2, {"detached.update_steps": 2})
    done.default("--train_epochs", 1, {"detached.train_epochs": 1})
    # their makers hold critic, reward model and initial model beside the actor
    done.default("whoever scores", "the maker", {"detached.score_on": "maker"})
    done.absent.append(
        "samples of any age: here detached.max_staleness bounds it, 1 by default, and makers wait"
    )


def _lengths(flags: GivenFlags) -> None:
    prompt = flags.count("max_input_len", PROMPT_LENGTH)
    whole = flags.count("max_seq_len", WHOLE_LENGTH[flags.done.program])
    settings = {"data.max_prompt_length": prompt, "data.max_response_length": whole - prompt}
    told = f"prompts are cut to {prompt} tokens, prompt and response to {whole}"
    flags.done.rename(told, settings | {"data.truncation": "right"})
    flags.done.default("top_k", 50, {"actor_rollout_ref.rollout.top_k": 50})
