"""Scores: rule functions, a reward model, the punishment of overlong responses, the user's code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import When, key, unless, when
from workers.config.conditions import NO_REWARD_LIST, has_no_reward
from workers.config.model import QUANTIZATIONS


def _rules_score(_: Any, run: Any) -> bool:
    model_alone = run.reward_model.enable and run.reward_model.rule_weight == 0
    is_wanted = bool(run.custom_reward_function.path) or not model_alone
    return is_wanted and not has_no_reward(run)


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
