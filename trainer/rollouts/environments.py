"""Environments and tools, looked at before a process of the run starts."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from verl_like.errors import ConfigError
from workers.agents.chat import TurnRenderer
from workers.agents.environment import in_full
from workers.agents.host import EnvironmentHost
from workers.agents.players import spec_of
from workers.config import plays


def check_environment(config: Any, tokenizer: Any) -> None:
    """Refuse code that is not there or cannot be called, and a template that does not take turns.

    Files are named in full from here on: workers may run in another folder.
    """
    if not plays(config):
        return
    own = config.environment
    if getattr(config, "generates_beside_training", False):
        raise ConfigError(
            "environment: trajectories of several turns are made between two updates. Leave "
            "detached makers out: `verl-like ppo` plays them."
        )
    if own.path:
        own.path = in_full(own.path)
    own.tools = [in_full(path) for path in own.tools]
    with closing(EnvironmentHost(spec_of(own), own.step_s)) as host:
        TurnRenderer(tokenizer, host.tools, [tokenizer.eos_token_id])
