"""The section `reward`: a function and a model, or a list of rewards, and settings for all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, unless, when
from verl_like.process.sandbox import Sandbox
from workers.config.conditions import NO_REWARD_LIST, has_no_reward
from workers.config.model import QUANTIZATIONS


def _rules_score(_: Any, run: Any) -> bool:
    model_alone = run.reward.model.enable and run.reward.function.weight == 0
    return bool(run.reward.function.path) or not (model_alone or has_no_reward(run))


RULES_SCORE = ReadWhen(
    "a rule scores",
    _rules_score,
    "no rule scores, because reward.function.weight=0 leaves the score to the model, or "
    "only a teacher provides advantages",
)


@dataclass(kw_only=True)
class OverlongPenaltyConfig(Section):
    """DAPO's soft punishment of responses that come near `data.max_response_length`."""

    enable: bool = config_field(False)
    """Penalize responses near the length limit."""
    len: int = config_field(0, allows="1 to `data.max_response_length`", read_when=when("enable"))
    """Tokens before the limit over which the penalty grows from 0."""
    penalty_factor: float = config_field(1.0, at_least=0, read_when=when("enable"))
    """Penalty at the limit."""


@dataclass(kw_only=True)
class UserCodeConfig(Section):
    """An object in a Python file or module, by name."""

    path: str = config_field("", allows="a .py file or a module")
    """Python file or importable module."""
    name: str = config_field("", allows="a name", read_when=unless("path", ""))
    """Name in that file or module."""


@dataclass(kw_only=True)
class RewardFunctionConfig(UserCodeConfig):
    """A function (data_source, solution_str, ground_truth, extra_info) -> score, sync or async."""

    name: str = config_field("compute_score", allows="a name", read_when=unless("path", ""))
    """Name in that file or module."""
    kwargs: dict[str, Any] = config_field(
        factory=dict,
        allows="what the function takes",
        read_when=unless("path", ""),
        verl="custom_reward_function.reward_kwargs",
    )
    """Extra keyword arguments of each call."""
    weight: float = config_field(1.0, allows="a number", read_when=when("reward.model.enable"))
    """Weight of the function or rule if a model also scores; 0 disables the rule."""


@dataclass(kw_only=True)
class RewardModelConfig(Section):
    """A sequence classifier with one output, on the actor's tokenizer."""

    enable: bool = config_field(False)
    """Score with a model."""
    path: str = config_field(
        "", allows="a folder or a name", read_when=when("enable"), verl="reward_model.model.path"
    )
    """Folder or hub name of a sequence classifier."""
    quantization: str | None = config_field(None, choices=QUANTIZATIONS, read_when=when("enable"))
    """`int8`: store linear weights as int8, unsharded on each rank; null disables quantization."""
    micro_batch_size_per_gpu: int | None = config_field(
        None, above=0, read_when=when("enable"), may_change_on_resume=True
    )
    """Samples per forward pass and rank; null: passes as large as the actor's."""


REWARD_KINDS = ("function", "model", "remote")
"""Kinds of rewards in `reward.list`; an environment adds a reward of the kind `environment`."""
ON_FAILURE = ("score", "skip", "fail")
"""What happens to a sample whose reward fails."""


IS_FUNCTION, IS_MODEL, IS_REMOTE = (when("kind", kind) for kind in REWARD_KINDS)
IS_NO_MODEL = unless("kind", "model", otherwise="a model always gives a score")
IS_JUDGE = when("protocol", "openai")


@dataclass(kw_only=True)
class RewardConfig(Section):
    """One reward: the source of its scores, its weight, and the treatment of failures."""

    name: str = config_field("", required="set a different name for every reward")
    """Name, as in the metric `reward/<name>_score/mean`."""
    kind: str = config_field("function", choices=REWARD_KINDS)
    """`function`: your function; `model`: a sequence classifier; `remote`: an HTTP server."""
    weight: float = config_field(1.0, allows="a number")
    """Weight in the sum of rewards."""
    normalize: bool = config_field(False)
    """Normalize scores by batch mean and standard deviation, except in validation."""
    on_failure: str = config_field("score", choices=ON_FAILURE, read_when=IS_NO_MODEL)
    """If scoring fails, `score`: the sample gets `score_on_failure`; `skip`: it is left out of the
    update; `fail`: the run ends.
    """
    score_on_failure: float = config_field(
        0.0, allows="a number", read_when=(IS_NO_MODEL, when("on_failure", "score"))
    )
    """Score of samples whose call failed."""
    timeout_s: float = config_field(10.0, above=0, read_when=IS_NO_MODEL)
    """Timeout per sample or request, in seconds; the timeout of a batch is 12 times as long."""
    path: str = config_field("", allows="a .py file, a module, or a model's folder or name")
    """File or module of the function, or folder or hub name of the model. Without a file or module,
    the row's data_source names a built-in rule.
    """
    function: str = config_field("compute_score", allows="a name", read_when=IS_FUNCTION)
    """Name in that file or module."""
    kwargs: dict[str, Any] = config_field(
        factory=dict, allows="what the function takes", read_when=IS_FUNCTION
    )
    """Extra keyword arguments of each call."""
    quantization: str | None = config_field(None, choices=QUANTIZATIONS, read_when=IS_MODEL)
    """`int8`: store linear weights as int8; null disables quantization."""
    micro_batch_size_per_gpu: int | None = config_field(None, above=0, read_when=IS_MODEL)
    """Samples per forward pass and rank; null: passes as large as the actor's."""
    url: str = config_field("", allows="http://HOST:PORT/PATH", read_when=IS_REMOTE)
    """Address of the reward server."""
    protocol: str = config_field(
        "samples", choices=("samples", "openrlhf", "openai"), read_when=IS_REMOTE
    )
    """Format of requests. `samples`: as `verl-like serve-reward` reads them; `openrlhf`: query,
    prompts, labels; `openai`: a chat completion (a judge).
    """
    batch_size: int = config_field(64, above=0, read_when=IS_REMOTE)
    """Samples per request; a judge always gets one."""
    retries: int = config_field(4, at_least=0, read_when=IS_REMOTE)
    """Retries after a temporary failure; 0 disables retries."""
    token_env: str = config_field("", allows="a variable's name", read_when=IS_REMOTE)
    """Environment variable with the bearer token."""
    template: str = config_field(
        "", allows="text with {prompt} and {solution_str}", read_when=(IS_REMOTE, IS_JUDGE)
    )
    """Prompt of the judge. It can contain any field of a sample in braces."""
    model: str = config_field("", allows="a model's name", read_when=(IS_REMOTE, IS_JUDGE))
    """Model name that a judge's request contains."""

    @property
    def label(self) -> str:
        """The reward in messages: the user's function and its file, or the reward's name."""
        if self.kind == "function" and self.path:
            return f"the reward function {self.function!r} in {self.path}"
        return f"the reward {self.name!r}"


def _functions_of_the_user(_: Any, run: Any) -> bool:
    if run.reward.list:
        return any(reward.kind == "function" and reward.path for reward in run.reward.list)
    return bool(run.reward.function.path)


def _may_fail(_: Any, run: Any) -> bool:
    if run.reward.list:
        return any(reward.kind != "model" for reward in run.reward.list)
    return _rules_score(_, run)


HAS_FUNCTION = ReadWhen(
    "a function of your own scores",
    _functions_of_the_user,
    "no function of your own scores. Set reward.function.path, or a `path` in reward.list",
)
MAY_FAIL = ReadWhen("a function or server scores", _may_fail, "no function and no server scores")


RewardList = list[RewardConfig]


@dataclass(kw_only=True)
class ScoringConfig(Section):
    """The rewards of a run, and rules for all of them."""

    function: RewardFunctionConfig = config_field(
        factory=RewardFunctionConfig, read_when=NO_REWARD_LIST, verl="custom_reward_function"
    )
    """Your reward function, instead of the built-in rule that a row's data_source names."""
    model: RewardModelConfig = config_field(
        factory=RewardModelConfig, read_when=NO_REWARD_LIST, verl="reward_model"
    )
    """A reward model, which the role `reward_model` loads."""
    list: RewardList = config_field(factory=RewardList, allows="a list of sections")
    """Weighted rewards, instead of `function` and `model`."""
    score_on_failure: float = config_field(
        0.0, allows="a number", read_when=(NO_REWARD_LIST, RULES_SCORE)
    )
    """Score of samples whose call failed."""
    timeout_s: float = config_field(10.0, above=0, read_when=(NO_REWARD_LIST, RULES_SCORE))
    """Timeout per sample in seconds; the timeout of a batch is 12 times as long."""
    overlong_penalty: OverlongPenaltyConfig = config_field(
        factory=OverlongPenaltyConfig, verl="reward_model.reward_kwargs.overlong_buffer_cfg"
    )
    """Penalty on long responses (DAPO)."""
    max_failed_fraction: float = config_field(
        0.5, at_least=0, at_most=1, read_when=MAY_FAIL, may_change_on_resume=True
    )
    """Fraction of failed samples in a batch above which the run ends."""
    trust_programs: bool = config_field(False, read_when=MAY_FAIL, may_change_on_resume=True)
    """Accept asserts of any form as tests of programs, which can then forge their scores."""
    sandbox: dict[str, Any] = config_field(
        factory=dict, options=Sandbox, read_when=HAS_FUNCTION, may_change_on_resume=True
    )
    """Sandbox of the reward functions."""
