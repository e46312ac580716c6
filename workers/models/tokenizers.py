"""Check that two models use the same token ids; check chat templates and set their variables."""

from __future__ import annotations

import multiprocessing
import re
import resource
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from verl_like.errors import ConfigError
from workers.models.folder import model_folder


def check_same_tokenizer(path: str, policy_path: str, role: str) -> None:
    """Reject a role's model whose token ids are not the policy's.

    A folder without a tokenizer cannot be checked.
    """
    vocabulary, policy = _vocabulary(path), _vocabulary(policy_path)
    if vocabulary is None or policy is None or vocabulary == policy:
        return

    tokens = vocabulary.keys() | policy.keys()
    other = sorted(token for token in tokens if vocabulary.get(token) != policy.get(token))
    raise ConfigError(
        f"the model of role {role!r}, {path!r}, has a different tokenizer from "
        f"actor_rollout_ref.model.path={policy_path!r}: {len(other)} tokens differ, such as "
        f"{', '.join(map(repr, other[:3]))}. Responses are not tokenized again for this model. "
        "Use a model of the actor's family."
    )


def set_template_variables(tokenizer: Any, values: Mapping[str, Any]) -> None:
    """Set variables of the chat template, such as `enable_thinking` of Qwen3."""
    template = tokenizer.chat_template or ""
    templates = template if isinstance(template, dict) else {"": template}
    for name in values:
        if not any(re.search(rf"\b{re.escape(name)}\b", text) for text in templates.values()):
            raise ConfigError(
                f"data.apply_chat_template_kwargs.{name}: the chat template of "
                f"{tokenizer.name_or_path} does not read {name!r}. Leave out the key, or use a "
                f"model folder whose template reads {name}."
            )
    # `+%}` preserves the line break that may follow
    start = "".join(f"{{% set {name} = {value!r} +%}}" for name, value in values.items())
    if start:
        templates = {name: start + text for name, text in templates.items()}
        tokenizer.chat_template = templates if isinstance(template, dict) else templates[""]


def _vocabulary(path: str) -> dict[str, int] | None:
    from transformers import AutoTokenizer

    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(
            model_folder(path, weights=False), local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError):
        return None
    return dict(tokenizer.get_vocab())


SECONDS = 10.0
"""Time limit for rendering a message of one letter."""
MEMORY = 2**30
"""Memory limit for rendering a message of one letter, in bytes."""


def check_template(tokenizer: Any) -> None:
    """Render one message in a child process; raise if the template exceeds its limits.

    A chat template is untrusted code.
    """
    if tokenizer.chat_template is None:
        return
    import jinja2.sandbox  # noqa: F401  # before the fork, where another thread may be importing

    problems, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_try, args=(tokenizer, sender))
    child.start()
    sender.close()
    try:
        problem = f"it wrote no chat within {SECONDS:g} s"
        if problems.poll(SECONDS):
            problem = problems.recv()
    except EOFError:
        problem = "its process died"
    finally:
        child.kill()
        child.join()
        problems.close()
    if problem:
        raise ConfigError(
            f"{tokenizer.name_or_path}: the chat template failed on a message of one letter: "
            f"{problem}. Replace the template in the model folder."
        )


def _try(tokenizer: Any, problems: Connection) -> None:
    """Render the message; describe a memory error. Other errors are reported later, per row."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    message = {"role": "user", "content": "a"}
    problem = ""
    try:
        tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except MemoryError:
        problem = f"it uses more than {MEMORY // 2**20:,} MiB"
    except Exception:  # noqa: BLE001 - process boundary
        pass
    problems.send(problem)
