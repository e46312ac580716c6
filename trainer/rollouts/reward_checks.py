"""Checks across the keys of rewards, for every recipe that scores samples."""

from __future__ import annotations

from typing import Any

from verl_like.errors import ConfigError


def check_rewards(config: Any) -> None:
    """Raise if the configured rewards cannot score samples."""
    if config.reward.list:
        names = [reward.name for reward in config.reward.list]
        for number, reward in enumerate(config.reward.list):
            where = f"reward.list[{number}]"
            if not reward.name.isidentifier() or names.index(reward.name) != number:
                raise ConfigError(
                    f"{where}.name={reward.name!r}: every reward needs a unique name of letters, "
                    "digits and _ that does not begin with a digit, because its metrics, columns "
                    "and roles contain the name."
                )
            if reward.kind == "model" and not reward.path:
                raise ConfigError(
                    f"{where} is a model. Set its path to the folder of a classifier."
                )
            if reward.kind == "remote":
                from workers.rewards.remote import check_url

                check_url(reward.url, reward.name)

        if not any(reward.weight for reward in config.reward.list):
            raise ConfigError(
                f"every weight in reward.list is 0 ({', '.join(names)}), so no reward counts. "
                "Set another weight."
            )
    elif config.reward.model.enable and not config.reward.model.path:
        raise ConfigError(
            "reward.model.enable=true needs a model. Set reward.model.path to the folder of a "
            "sequence classifier."
        )

    buffer, limit = config.reward.overlong_penalty, config.data.max_response_length
    if buffer.enable and not 0 < buffer.len <= limit:
        raise ConfigError(
            f"reward.overlong_penalty.len={buffer.len} tokens: it must be between 1 and "
            f"data.max_response_length={limit}; DAPO uses a fifth of this limit."
        )
