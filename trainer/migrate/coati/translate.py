"""A command line of `train_prompts.py`, or of a script with makers and trainers, in our settings.

The maths is `algorithm=coati_legacy`. `train_prompts.py` becomes `verl-like ppo` on one pool, the
others `verl-like detached`.
"""

from __future__ import annotations

from trainer.migrate.coati.flags import ABSENT, ALWAYS, DETACHED, ONE_GROUP, RENAMED, TOGETHER
from trainer.migrate.command import Flags, as_flags, commands_of, read_words
from trainer.migrate.translation import Translation
from verl_like.errors import ConfigError, nearest
from workers.config.model import STRATEGIES_ELSEWHERE

ACTOR, MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MARKS = ("num_makers", "num_trainers", "experience_steps", "trainer_strategy")
"""Flags by which a command line without its script is one of makers and trainers."""
PROMPT_LENGTH = 96
WHOLE_LENGTH = {"ppo": 128, "detached": 512}
"""What the scripts cut prompts to, and prompt and response together."""


def translate(text: str) -> Translation:
    """Settings, and a word on every flag."""
    script, words = read_words(text, *ONE_GROUP, *DETACHED)
    flags = as_flags(words)
    is_detached = script in DETACHED or (not script and any(mark in flags for mark in MARKS))
    done = Translation(program="detached" if is_detached else "ppo")
    done.set("algorithm", "coati_legacy")
    given = _Given(flags)
    _models(given, done)
    if is_detached:
        _makers_and_trainers(given, done, one_maker=script.startswith("1mmt"))
    else:
        _one_group(given, done, _processes(text))
    _lengths(given, done)
    _optimizer(given, done)
    _alone(flags, done)
    return done


class _Given:
    """The flags of one command."""

    def __init__(self, flags: Flags) -> None:
        self._flags = flags

    def value(self, name: str, default: str = "") -> str:
        """Its value, or the script's default; a flag without one is True."""
        if name not in self._flags:
            return default
        return (self._flags[name] or ["True"])[0]

    def count(self, name: str, default: int) -> int:
        """The same as a whole number; a shell variable has none."""
        text = self.value(name, str(default))
        if not text.isdigit():
            raise ConfigError(
                f"--{name} is {text!r}: this figure is computed with others, so replace the shell "
                "variable by its number."
            )
        return int(text)


def _models(given: _Given, done: Translation) -> None:
    """One folder gives reward model and critic, as in the scripts."""
    for name in ("rm_pretrain", "critic_pretrain"):
        folder = given.value(name)
        if folder:
            settings = {
                "reward_model.enable": True,
                "reward_model.model.path": folder,
                "reward_model.rule_weight": 0,
                "critic.model.path": folder,
            }
            done.rename(f"--{name}", [folder], settings)
    for name in ("strategy", "trainer_strategy"):
        word = given.value(name)
        if word:
            ours = STRATEGIES_ELSEWHERE.get(word, word)
            settings = {f"{ACTOR}.strategy": ours, "critic.strategy": ours}
            done.rename(f"--{name}", [word], settings)
    rank = given.count("lora_rank", 0)
    if rank:
        settings = {f"{MODEL}.lora_rank": rank, f"{MODEL}.lora_alpha": 1}
        done.rename("--lora_rank", [str(rank)], settings | {"critic.model.lora_rank": rank})


def _one_group(given: _Given, done: Translation, processes: int) -> None:
    """A step is the experience of `update_timesteps` batches, which every process makes anew."""
    experience = given.count("experience_batch_size", 8)
    train = given.count("train_batch_size", 8)
    steps = given.count("max_timesteps", 10)
    collected = given.count("num_collect_steps", given.count("update_timesteps", 10))
    episodes = given.count("num_episodes", 10)
    if given.value("num_collect_steps"):  # the later script has one update an episode
        steps = collected
    prompts = experience * collected * processes
    total = max(episodes * steps // collected, 1)
    told = (
        f"--num_episodes {episodes} of {steps} timesteps, an update every {collected}, "
        f"--experience_batch_size {experience}"
    )
    done.rename(told, [], {"data.train_batch_size": prompts, "trainer.total_training_steps": total})
    size = min(train * processes, prompts)
    done.rename("--train_batch_size", [str(train)], {f"{ACTOR}.ppo_mini_batch_size": size})
    epochs = given.count("num_update_steps", given.count("max_epochs", 1))
    done.rename("--max_epochs, --num_update_steps", [], {f"{ACTOR}.ppo_epochs": epochs})
    done.set("trainer.n_gpus_per_node", processes)
    coef = given.value("ptx_coef", "0.9")
    if given.value("pretrain_dataset") and float(coef) < 1:
        ratio = f"{float(coef) / (1 - float(coef)):.6g}"
        done.rename("--ptx_coef", [coef], {"ptx.coef": ratio})


def _makers_and_trainers(given: _Given, done: Translation, *, one_maker: bool) -> None:
    """A batch of every trainer rank is one of ours; their number follows from what is made."""
    makers = 1 if one_maker else given.count("num_makers", 1)
    trainers = given.count("num_trainers", 1)
    train = given.count("train_batch_size", 8)
    made = given.count("experience_batch_size", 8) * given.count("experience_steps", 4) * makers
    settings = {"detached.makers": makers, "detached.trainers": trainers}
    done.rename("--num_makers, --num_trainers", [], settings)
    batch = train * trainers
    sizes = {"data.train_batch_size": batch, f"{ACTOR}.ppo_mini_batch_size": batch}
    done.rename(f"--train_batch_size {train} of every trainer", [], sizes)
    total = {"trainer.total_training_steps": max(made // batch, 1)}
    done.rename("--experience_batch_size, --experience_steps", [], total)
    for name, default in (("update_steps", 2), ("train_epochs", 1)):
        key = f"detached.{name}"
        done.default(f"--{name}", default, {key: given.value(name, str(default))})
    # their makers hold critic, reward model and initial model beside the actor
    done.default("whoever scores", "the maker", {"detached.score_on": "maker"})
    done.absent.append(
        "samples of any age: here detached.max_staleness bounds it, 1 by default, and makers wait"
    )


def _lengths(given: _Given, done: Translation) -> None:
    prompt = given.count("max_input_len", PROMPT_LENGTH)
    whole = given.count("max_seq_len", WHOLE_LENGTH[done.program])
    settings = {"data.max_prompt_length": prompt, "data.max_response_length": whole - prompt}
    told = f"prompts are cut to {prompt} tokens, prompt and response to {whole}"
    done.rename(told, [], settings | {"data.truncation": "right"})
    done.default("top_k", 50, {"actor_rollout_ref.rollout.top_k": 50})


def _optimizer(given: _Given, done: Translation) -> None:
    """Adam at 1e-7, without weight decay, unless the script has `--lr`."""
    rate = given.value("lr", "1e-7")
    keys = (f"{ACTOR}.optim.lr", "critic.optim.lr")
    if given.value("lr"):
        done.rename("--lr", [rate], dict.fromkeys(keys, rate))
    done.default("the learning rate", rate, dict.fromkeys(keys, rate))
    done.default("Adam's weight decay", 0, {f"{ACTOR}.optim.weight_decay": 0})
    if given.value("use_wandb"):
        done.rename("--use_wandb", [], {"trainer.logger": ["console", "wandb"]})


def _alone(flags: Flags, done: Translation) -> None:
    """What no section has told, by the tables."""
    unknown = []
    for name, values in flags.items():
        flag = " ".join([f"--{name}", *values])
        if name in RENAMED and RENAMED[name] not in done.settings:
            done.rename(f"--{name}", values, {RENAMED[name]: (values or ["True"])[0]})
        elif name in ALWAYS:
            done.always.append(f"{flag}: {ALWAYS[name]}")
        elif name in ABSENT:
            done.absent.append(f"{flag}: {ABSENT[name]}")
        elif name not in RENAMED and name not in TOGETHER:
            unknown.append(name)
        elif not done.tells(f"--{name}"):
            done.joined.append(flag)
    if unknown:
        hints = " ".join(nearest(name, [*RENAMED, *TOGETHER, *ALWAYS, *ABSENT]) for name in unknown)
        listed = ", ".join(f"--{name}" for name in unknown)
        raise ConfigError(f"ColossalChat's PPO scripts have no flag {listed}.{hints}")


def _processes(text: str) -> int:
    """Of `torchrun --nproc_per_node`, or one."""
    for words in commands_of(text):
        values = as_flags(words).get("nproc_per_node", as_flags(words).get("nproc-per-node"))
        if values and values[0].isdigit():
            return int(values[0])
    return 1
