"""`environment=verifiers:NAME` plays an installed environment package of verifiers (>= 0.4).

The package's own harness, tools and rewards run, and its agents call the policy. All samples of a
prompt play the same task of the package. If several agents call the policy, each is a player. An
agent with its own `model` and `client` calls that server instead, and is not trained.
`environment.kwargs` is the package's configuration, such as `{taskset: {split: train}}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.adapters import imported

MAX_TASKS = 10_000
"""Maximum number of tasks loaded from a package."""


def agent(name: str, kwargs: Mapping[str, Any]) -> Callable[..., Any]:
    """Return a function of a row, which plays a task of the package."""
    vf = imported("verifiers.v1", f"verifiers:{name}", "verifiers>=0.4")
    try:
        taskset = {"id": name, **kwargs.get("taskset", {})}
        config = vf.resolve_env_config({**kwargs, "taskset": taskset})
        roles = {role: getattr(config, role) for role in config.agent_harnesses()}
        players = [role for role, settings in roles.items() if settings.model is None]
        for role, settings in roles.items():
            if settings.model and settings.client is None:  # it would call the policy
                raise ValueError(f"{role}.model needs {role}.client: {{type: eval, base_url: URL}}")
            if "runtime" not in kwargs.get(role, {}):  # the default is a paid cloud sandbox
                settings.runtime = vf.SubprocessConfig()
            if len(players) > 1 and role in players:
                settings.model = role
        environment = vf.load_environment(config)
        tasks = list(itertools.islice(environment.taskset, MAX_TASKS))
        if not players or not tasks:
            raise ValueError("it has no task, or no agent that calls the policy")
    except (ModuleNotFoundError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"environment=verifiers:{name} could not be loaded: {type(error).__name__}: {error}"
        ) from error

    async def run(row: Mapping[str, Any], rng: Any, base_url: str, model: str) -> Any:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var="OPENAI_API_KEY")
        task = tasks[int(rng.integers(len(tasks)))]
        async with environment.serving():
            context = vf.ModelContext(model=model, client=client)
            episode = await environment.run_episode(task, context)
        if not episode.ok:
            errors = [error for part in (episode, *episode.traces) for error in part.errors]
            raise RuntimeError(f"{name}: {errors[0].message if errors else 'it failed'}")
        rewards: dict[str, list[float]] = {player: [] for player in players}
        for trace in episode.traces:
            if trace.agent.name in rewards:
                rewards[trace.agent.name].append(trace.reward)
        means = {player: sum(values) / max(len(values), 1) for player, values in rewards.items()}
        return means if len(players) > 1 else means[players[0]]

    run.players = players if len(players) > 1 else ()  # type: ignore[attr-defined]
    return run
