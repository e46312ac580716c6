"""Rewards: verl's sections of a rule and a model, or a list of any number; what holds for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import When, key, unless, when
from verl_like.process.sandbox import Sandbox
from workers.config.conditions import NO_REWARD_LIST, has_no_reward
from workers.config.model import QUANTIZATIONS


def _rules_score(_: Any, run: Any) -> bool:
    model_alone = run.reward_model.enable and run.reward_model.rule_weight == 0
    return bool(run.custom_reward_function.path) or not (model_alone or has_no_reward(run))


RULES_SCORE = When(
    "a rule scores",
    _rules_score,
    "no rule scores: reward_model.rule_weight=0 leaves the score to the model, or a teacher alone "
    "gives the advantages",
)


@dataclass(kw_only=True)
class OverlongBufferConfig:
    """DAPO's soft punishment of responses that come near `data.max_response_length`."""

    enable: bool = key(False, verl="reward_model.reward_kwargs.overlong_buffer_cfg.enable")
    """Punish responses that come near the limit."""
    len: int = key(
        0,
        allows="1 to `data.max_response_length`",
        read_when=when("enable"),
        verl="reward_model.reward_kwargs.overlong_buffer_cfg.len",
    )
    """Tokens before the limit over which the punishment grows from 0."""
    penalty_factor: float = key(
        1.0,
        at_least=0,
        read_when=when("enable"),
        verl="reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor",
    )
    """The punishment at the limit."""


@dataclass(kw_only=True)
class ScoringModelConfig:
    """A sequence classifier with one output, on the actor's tokenizer."""

    path: str = key("", allows="a folder")
    """Hugging Face folder of the classifier."""
    quantization: str | None = key(None, choices=QUANTIZATIONS)
    """int8: linear weights are held as int8, whole on every rank; null: as passes compute."""


@dataclass(kw_only=True)
class UserCodeConfig:
    """A name in a file or module of the user's."""

    path: str = key("", allows="a .py file or a module")
    """A Python file, or a module as one imports it; empty: none."""
    name: str = key("", allows="a name", read_when=unless("path", ""))
    """What to take from it."""


@dataclass(kw_only=True)
class RewardFunctionConfig(UserCodeConfig):
    """A function (data_source, solution_str, ground_truth, extra_info) -> score, sync or async."""

    name: str = key("compute_score", allows="a name", read_when=unless("path", ""))
    """What to take from it."""
    reward_kwargs: dict[str, Any] = key(
        factory=dict, allows="what the function takes", read_when=unless("path", "")
    )
    """Keyword arguments that every call gets besides."""


@dataclass(kw_only=True)
class RewardModelConfig:
    """Scores: rule functions, a reward model, or both."""

    enable: bool = key(False, read_when=NO_REWARD_LIST)
    """Score with a model; starts the reward_model role."""
    model: ScoringModelConfig = key(factory=ScoringModelConfig, read_when=when("enable"))
    """The model that scores."""
    micro_batch_size_per_gpu: int | None = key(
        None, above=0, read_when=when("enable"), may_change_on_resume=True
    )
    """Samples per forward pass of the model on one rank; null cuts passes as the actor's."""
    overlong_buffer: OverlongBufferConfig = key(factory=OverlongBufferConfig)
    """Punishment of overlong responses."""
    rule_weight: float = key(1.0, allows="a number", read_when=when("enable"))
    """What the rule's score counts beside the model's; 0 leaves the score to the model."""
    default_score: float = key(0.0, allows="a number", read_when=(NO_REWARD_LIST, RULES_SCORE))
    """Score where the rule function raises, gives no finite number, or passes its deadline."""
    sample_timeout_s: float = key(10.0, above=0, read_when=(NO_REWARD_LIST, RULES_SCORE))
    """Deadline of the rule function for one sample; a batch gets twelve times that."""


REWARD_KINDS = ("function", "model", "remote")
"""What a reward may be."""
ON_FAILURE = ("default", "skip", "fail")
"""What may become of a sample whose reward fails."""


IS_FUNCTION, IS_MODEL, IS_REMOTE = (when("kind", kind) for kind in REWARD_KINDS)
IS_NO_MODEL = unless("kind", "model", otherwise="a model always gives a score")
IS_JUDGE = when("protocol", "openai")


@dataclass(kw_only=True)
class RewardConfig:
    """One reward: where its scores come from, what they weigh, what a failure costs."""

    name: str = key("", required="give every reward a name of its own")
    """The reward in metrics: `reward/<name>_score/mean`."""
    kind: str = key("function", choices=REWARD_KINDS)
    """A function of the user's, a sequence classifier, or a server that speaks HTTP."""
    weight: float = key(1.0, allows="a number")
    """What its scores are multiplied by before they are added to the others'."""
    normalize: bool = key(False)
    """Take the mean of a batch's scores from them and divide by their spread; not in validation."""
    on_failure: str = key("default", choices=ON_FAILURE, read_when=IS_NO_MODEL)
    """default scores the sample by `default_score`; skip leaves it out of the update; fail ends the
    run.
    """
    default_score: float = key(
        0.0, allows="a number", read_when=(IS_NO_MODEL, when("on_failure", "default"))
    )
    """Score of a sample whose reward raises, gives no finite number, or passes its deadline."""
    timeout_s: float = key(10.0, above=0, read_when=IS_NO_MODEL)
    """Deadline of a function for one sample, of a server for one request; a batch gets twelve times
    that.
    """
    path: str = key("", allows="a .py file, a module, or a model's folder")
    """File or module of the function, folder of the model; a function without one is the rule of
    each row's data_source.
    """
    function: str = key("compute_score", allows="a name", read_when=IS_FUNCTION)
    """What to take from it."""
    kwargs: dict[str, Any] = key(
        factory=dict, allows="what the function takes", read_when=IS_FUNCTION
    )
    """Keyword arguments that every call gets besides."""
    quantization: str | None = key(None, choices=QUANTIZATIONS, read_when=IS_MODEL)
    """int8: the model's linear weights are held as int8; null: as passes compute."""
    micro_batch_size_per_gpu: int | None = key(None, above=0, read_when=IS_MODEL)
    """Samples per forward pass of the model on one rank; null cuts passes as the actor's."""
    url: str = key("", allows="http://HOST:PORT/PATH", read_when=IS_REMOTE)
    """Address of the server."""
    protocol: str = key("samples", choices=("samples", "openrlhf", "openai"), read_when=IS_REMOTE)
    """samples: our own server's; openrlhf: query, prompts, labels; openai: a chat completion."""
    batch_size: int = key(64, above=0, read_when=IS_REMOTE)
    """Samples of one request; a judge gets one."""
    retries: int = key(4, at_least=0, read_when=IS_REMOTE)
    """Further requests after one that failed for now."""
    token_env: str = key("", allows="a variable's name", read_when=IS_REMOTE)
    """Environment variable with the bearer token; empty: none is sent."""
    template: str = key(
        "", allows="text with {prompt} and {solution_str}", read_when=(IS_REMOTE, IS_JUDGE)
    )
    """What a judge is asked; any field of a sample may stand in braces."""
    model: str = key("", allows="a model's name", read_when=(IS_REMOTE, IS_JUDGE))
    """The model that the judge's server is asked for."""


_DEFAULT = Sandbox()


def _functions_of_the_user(_: Any, run: Any) -> bool:
    if run.rewards:
        return any(reward.kind == "function" and reward.path for reward in run.rewards)
    return bool(run.custom_reward_function.path)


def _may_fail(_: Any, run: Any) -> bool:
    if run.rewards:
        return any(reward.kind != "model" for reward in run.rewards)
    return _rules_score(_, run)


HAS_FUNCTION = When(
    "a function of your own scores",
    _functions_of_the_user,
    "no function of your own scores: set custom_reward_function.path, or a `path` in `rewards`",
)
MAY_FAIL = When("a function or server scores", _may_fail, "no function and no server scores")


@dataclass(kw_only=True)
class SandboxConfig:
    """What the processes of each reward function may have."""

    may_change_on_resume = True
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
