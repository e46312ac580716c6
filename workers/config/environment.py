"""Environments that a policy acts in, and tools that it may call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from verl_like.config_key import ReadWhen, Section, config_field, replace_keys
from verl_like.errors import ConfigError, nearest
from verl_like.process.sandbox import Sandbox


def has_environment(run: Any) -> bool:
    """True if samples are trajectories of several turns."""
    environment = getattr(run, "environment", None)
    return environment is not None and bool(
        environment.path or environment.paths or environment.tools
    )


HAS_ENVIRONMENT = ReadWhen(
    "there is an environment, or a tool",
    lambda _, run: has_environment(run),
    "a sample is one response. Set environment.path, or environment.tools",
)
HAS_CLASS = ReadWhen(
    "`path` or `paths` is set",
    lambda environment, _: bool(environment.path or environment.paths),
    "environment.path is not set",
)


LIMITS: dict[str, Any] = {
    "max_turns": int,
    "max_tokens_per_segment": int,
    "share": (int, float),
    "step_timeout_s": (int, float),
    "trajectory_timeout_s": (int, float),
}
"""Settings of single environments (`by_name`), and their types."""
HAS_SEVERAL = ReadWhen(
    "`paths` is set",
    lambda environment, _: bool(environment.paths),
    "environment.paths is not set",
)


@dataclass(kw_only=True)
class EnvironmentConfig(Section):
    """The environment of a policy; each running trajectory has its own process."""

    path: str = config_field("", allows="FILE.py:CLASS, package.module:CLASS, or PREFIX:ID")
    """Environment class, agent's function, or another package's environment, such as
    gymnasium:FrozenLake-v1; short form: `environment=...`.
    """
    paths: dict[str, str] = config_field(factory=dict, allows="{NAME: PATH}")
    """Several environments; the data's column `environment` names one of them. Short form:
    `environment={NAME: PATH}`.
    """
    kwargs: dict[str, Any] = config_field(
        factory=dict, allows="what the class takes", read_when=HAS_CLASS
    )
    """Keyword arguments of the class or function. With several environments: a dict by name."""
    tools: list[str] = config_field(
        factory=list, allows="FILE.py:FUNCTION, or package.module:FUNCTION"
    )
    """Functions that the policy can call; short form: `tools=[...]`."""
    tool_call_parser: str | None = config_field(
        None, allows="the name of a format, or FILE.py:FUNCTION"
    )
    """Format of tool calls, or your parser; null: the format that the chat template implies."""
    request_settings: str = config_field(
        "serve", choices=("serve", "override", "reject"), may_change_on_resume=True
    )
    """Sampling settings in an agent's requests. `serve`: use the supported ones; `override`: use
    the run's; `reject`: reject those that differ from the run's.
    """
    endpoint: str | None = config_field(None, allows="ADDRESS:PORT", hint="or null")
    """Address where agents in containers or on other machines reach the policy, such as
    0.0.0.0:8000; null: they cannot. Each rollout process takes the first free port from there.
    """
    repeated_requests: str = config_field("sample", choices=("sample", "reuse"))
    """If an agent repeats a request, `sample`: sample a new turn; `reuse`: return the first reply.
    """
    images: bool = config_field(False)
    """Observations and agents' requests may have images; not needed if the rows have images."""
    max_turns: int = config_field(8, above=0)
    """Maximum turns per trajectory."""
    max_tokens_per_turn: int | None = config_field(
        None, above=0, hint="or null for all that remain of the response"
    )
    """Maximum tokens per turn; null: all that remain of the response."""
    max_tokens_per_segment: int | None = config_field(
        None, above=0, hint="or null for all that remain of the response"
    )
    """Maximum tokens per segment (branch of a chat), with its prompt; null: only
    `data.max_response_length` limits the segments, all together.
    """
    history_tokens: str = config_field("sampled", choices=("sampled", "retokenized"))
    """How a turn reads the older turns. `sampled`: as the sampled tokens; `retokenized`: as the
    chat template renders them, tokenized again.
    """
    history_reasoning: bool = config_field(True)
    """Give the chat template the reasoning of older turns if it renders them again."""
    step_timeout_s: float = config_field(30.0, above=0, may_change_on_resume=True)
    """Timeout of an environment's reply, in seconds."""
    trajectory_timeout_s: float = config_field(600.0, above=0, may_change_on_resume=True)
    """Timeout of a whole trajectory, in seconds."""
    by_name: dict[str, Any] = config_field(
        factory=dict, allows="{NAME: {max_turns: 30}}", read_when=HAS_SEVERAL
    )
    """`max_turns`, `max_tokens_per_segment`, `step_timeout_s` and `trajectory_timeout_s` of single
    environments, by name, and `share`: the fraction of each step's prompts.
    """
    retries: int = config_field(2, at_least=0, may_change_on_resume=True)
    """Maximum restarts of a trajectory whose environment failed."""
    reward_on_failure: float | None = config_field(
        None, allows="a number", may_change_on_resume=True
    )
    """Reward of trajectories that fail after a turn; null leaves them out of the update."""
    max_failed_fraction: float = config_field(0.5, at_least=0, at_most=1, may_change_on_resume=True)
    """Fraction of failed trajectories in a batch above which the run ends."""
    sandbox: dict[str, Any] = config_field(factory=dict, options=Sandbox, may_change_on_resume=True)
    """Sandbox of the environments: limits of memory, CPU time, files, processes and network."""

    def of(self, name: str) -> EnvironmentConfig:
        """Return the settings of the environment with this name."""
        limits = self.by_name.get(name, {})
        return replace_keys(self, {key: limits[key] for key in limits if key != "share"})

    @property
    def shares(self) -> dict[str, float]:
        """The fraction of each environment in the prompts of a step, by name; {} if none is set."""
        return {name: limits["share"] for name, limits in self.by_name.items() if "share" in limits}

    def check_by_name(self) -> None:
        """Reject `by_name` with unknown environments, or with other keys or values."""
        for name, limits in self.by_name.items():
            where = f"environment.by_name={{{name}: {limits}}}"
            if name not in self.paths:
                names = ", ".join(self.paths)
                raise ConfigError(
                    f"{where}: environment.paths contains only {names}.{nearest(name, self.paths)}"
                )
            for key, limit in limits.items() if isinstance(limits, dict) else [("", None)]:
                kind = LIMITS.get(key)
                if kind is None or not isinstance(limit, kind) or isinstance(limit, bool):
                    keys = ", ".join(LIMITS)
                    raise ConfigError(f"{where}: set {keys} to numbers.{nearest(key, LIMITS)}")
                if limit <= 0:
                    raise ConfigError(f"{where}: {key} must be above 0.")
        shares, total = self.shares, sum(self.shares.values())
        if shares and (shares.keys() != self.paths.keys() or abs(total - 1) > 1e-6):
            raise ConfigError(
                f"environment.by_name={self.by_name}: give each of {', '.join(self.paths)} a "
                f"share, so that their sum is 1; now it is {total:g}."
            )
