"""Valid keys that this run does not read.

A key declares at its field when it is read (`read_when`). A condition of a section covers all its
keys. A key that the user set and that this run does not read is a notice, never an error, because
people switch estimators and keep their scripts. `--cfg job` prints only the keys that the run
reads (`trainer.config.show`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeVar

from trainer.config.keys import Arguments, leaves_of_items, path_to, value_at
from trainer.config.schema import RunConfig
from verl_like.config_key import replace_keys

C = TypeVar("C", bound=RunConfig)


def notice_of(names: Collection[str], reason: str) -> str:
    """Return the notice that these keys have no effect."""
    verb = "has" if len(names) == 1 else "have"
    return f"note: {', '.join(names)} {verb} no effect: {reason}"


def unused_in_items(config: RunConfig, keys: Iterable[str]) -> Iterator[str]:
    """Yield notices of unused keys that the user set in items, such as `reward.list[0].retries`."""
    sections = {name.partition(".")[0] for name in keys}
    for key, section in leaves_of_items(config):
        if key.name.partition(".")[0].partition("[")[0] in sections:
            is_set = getattr(section, key.leaf) != getattr(type(section)(), key.leaf)
            if is_set:
                for condition in key.rules.read_when:
                    if not condition.condition(section, config):
                        yield notice_of([key.name], condition.missing(key.section, config))
                        break


def unused_reason(config: RunConfig, name: str) -> str | None:
    """Return why the run does not read the key `name`, or None if it does."""
    for key in path_to(type(config), name):
        if key.is_section and key.name == name:
            continue  # such as `critic={}`, which sets no key
        section = value_at(config, key.section)
        for condition in key.rules.read_when:
            if not condition.condition(section, config):
                return condition.missing(key.section, config)
        if key.rules.arguments_of and name != key.name:
            arguments = Arguments.of(key, section)
            argument = name.removeprefix(f"{key.name}.")
            if argument not in arguments.taken:
                return f"the {arguments.kind} of this run does not accept {argument}"
    return None


def without_unread(config: C, keys: Collection[str]) -> tuple[C, list[str]]:
    """Reset the keys that the run does not read, and return notices about them.

    Arguments of a registered entry are removed. Without a key, the run may not read others.
    """
    schema, default = type(config), type(config)()
    unused: dict[str, list[str]] = {}
    left = list(keys)
    while True:
        reasons = {name: unused_reason(config, name) for name in left}
        unread = {name: reason for name, reason in reasons.items() if reason}
        if not unread:
            break
        for name, reason in unread.items():
            unused.setdefault(reason, []).append(name)
            left.remove(name)
            key = path_to(schema, name)[-1]
            value = value_at(default, key.name)
            if key.rules.arguments_of and name != key.name:
                value = dict(value_at(config, key.name))
                value.pop(name.removeprefix(f"{key.name}."), None)
            config = replace_keys(config, {key.name: value})
    notices = [notice_of(names, reason) for reason, names in unused.items()]
    return config, [*notices, *unused_in_items(config, keys)]
