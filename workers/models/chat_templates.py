"""A chat template is untrusted code: test it under limits before a run uses it."""

from __future__ import annotations

import multiprocessing
import resource
from multiprocessing.connection import Connection
from typing import Any

from verl_like.errors import ConfigError

SECONDS = 10.0
"""Time limit for rendering a message of one letter."""
MEMORY = 2**30
"""Memory limit, in bytes, for rendering it."""


def check_template(tokenizer: Any) -> None:
    """Render one message in a child process; raise if the template exceeds its limits."""
    if tokenizer.chat_template is None:
        return
    import jinja2.sandbox  # noqa: F401  # before the fork, where another thread may be importing

    problems, sender = multiprocessing.Pipe(duplex=False)
    child = multiprocessing.get_context("fork").Process(target=_try, args=(tokenizer, sender))
    child.start()
    sender.close()
    try:
        problem = f"it has not written a chat in {SECONDS:g} s"
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
            f"{tokenizer.name_or_path}: the chat template is rejected: {problem}, for a message "
            "of one letter. Give the model folder another."
        )


def _try(tokenizer: Any, problems: Connection) -> None:
    """Send a description of a memory problem; other errors are reported later, per row."""
    with open("/proc/self/statm", encoding="ascii") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY, now + MEMORY))
    message = {"role": "user", "content": "a"}
    problem = ""
    try:
        tokenizer.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
    except MemoryError:
        problem = f"it takes more than {MEMORY // 2**20:,} MiB"
    except Exception:  # noqa: BLE001 - process boundary
        pass
    problems.send(problem)
