"""One of several rewards: `rewards=[{name: ..., kind: function|model|remote, ...}, ...]`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import key, unless, when
from workers.config.model import QUANTIZATIONS

REWARD_KINDS = ("function", "model", "remote")
"""What a reward may be."""
ON_FAILURE = ("default", "skip", "fail")
"""What may become of a sample whose reward fails."""


IS_FUNCTION, IS_MODEL, IS_REMOTE = (when("kind", kind) for kind in REWARD_KINDS)
MAY_FAIL = unless("kind", "model", otherwise="a model always gives a score")
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
    on_failure: str = key("default", choices=ON_FAILURE, read_when=MAY_FAIL)
    """default scores the sample by `default_score`; skip leaves it out of the update; fail ends the
    run.
    """
    default_score: float = key(
        0.0, allows="a number", read_when=(MAY_FAIL, when("on_failure", "default"))
    )
    """Score of a sample whose reward raises, gives no finite number, or passes its deadline."""
    timeout_s: float = key(10.0, above=0, read_when=MAY_FAIL)
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
