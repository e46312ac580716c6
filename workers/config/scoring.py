"""What holds for all rewards of a run: how many samples may fail, and the sandbox of functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from verl_like.config_key import When, key
from verl_like.process.sandbox import Sandbox
from workers.config.conditions import has_no_reward

_DEFAULT = Sandbox()


def _functions_of_the_user(_: Any, run: Any) -> bool:
    if run.rewards:
        return any(reward.kind == "function" and reward.path for reward in run.rewards)
    return bool(run.custom_reward_function.path)


def _may_fail(_: Any, run: Any) -> bool:
    if run.rewards:
        return any(reward.kind != "model" for reward in run.rewards)
    model_alone = run.reward_model.enable and run.reward_model.rule_weight == 0
    return bool(run.custom_reward_function.path) or not (model_alone or has_no_reward(run))


HAS_FUNCTION = When(
    "a function of your own scores",
    _functions_of_the_user,
    "no function of your own scores: set custom_reward_function.path, or a `path` in `rewards`",
)
MAY_FAIL = When("a function or server scores", _may_fail, "no function and no server scores")


@dataclass(kw_only=True)
class SandboxConfig:
    """What the processes of each reward function may have."""

    may_change_on_resume: ClassVar[bool] = True
    memory_gb: float = key(_DEFAULT.memory_gb, above=0)
    """GiB of memory of each process, and of all that a function has started together."""
    cpu_s: float = key(_DEFAULT.cpu_s, above=0)
    """Seconds of processor time for a sample; a batch, and coroutines together, get twelve times
    that.
    """
    file_gb: float = key(_DEFAULT.file_gb, at_least=0)
    """GiB of a file that a function writes, and of all files in its working folder together."""
    processes: int = key(_DEFAULT.processes, above=0)
    """Processes that a function may have at the same time."""
    network: bool = key(_DEFAULT.network)
    """Whether a function reaches the network; false needs the network namespaces of Linux."""
    env: list[str] = key(factory=list, allows="names of variables")
    """Environment variables that it sees beside harmless ones: keys of APIs that it asks."""


@dataclass(kw_only=True)
class ScoringConfig:
    """Rules for every reward of the run."""

    max_failed: float = key(
        0.5, at_least=0, at_most=1, read_when=MAY_FAIL, may_change_on_resume=True
    )
    """Share of a batch's samples above which failures of a reward end the run; 1 never ends it."""
    sandbox: SandboxConfig = key(factory=SandboxConfig, read_when=HAS_FUNCTION)
    """Limits of reward functions."""
