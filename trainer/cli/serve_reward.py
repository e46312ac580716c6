"""`verl-like serve-reward`: a reward function behind HTTP, until it is told to stop."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from verl_like.errors import ConfigError, nearest
from verl_like.files import parse_json
from verl_like.process.sandbox import Sandbox
from workers.rewards.process import FunctionSpec
from workers.rewards.server import RewardServer

ON_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    options = _parser().parse_args(arguments)
    token = os.environ.get(options.token_env, "") if options.token_env else ""
    if options.token_env and not token:
        raise ConfigError(f"--token-env={options.token_env}: that variable is not set, or empty.")
    if options.host not in ON_THIS_MACHINE and not token:
        raise ConfigError(
            f"--host={options.host} is open to other machines: give a secret by --token-env=NAME."
        )

    spec = _function(options)
    try:
        server = RewardServer(spec, options.host, options.port, token, options.batch_timeout_s)
    except OSError as err:
        raise ConfigError(f"{options.host}:{options.port} cannot be listened on: {err}") from err

    for number in (signal.SIGINT, signal.SIGTERM):
        # in a thread of its own: shutdown waits for the loop that the signal interrupts
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"{spec} answers at {server.url}", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like serve-reward", description=__doc__)
    add = parser.add_argument
    add("--function", default="", help="FILE.py[:NAME] or MODULE[:NAME]; none: by data_source")
    add("--kwargs", type=json_object, default={}, help="JSON object of more keyword arguments")
    add("--sandbox", type=json_object, default={}, help="JSON object of reward.sandbox's keys")
    add("--host", default="127.0.0.1", help="another one needs --token-env")
    add("--port", type=int, default=8000, help="0 takes a free one")
    add("--token-env", default="", help="environment variable with the bearer token to ask for")
    add("--sample-timeout-s", type=float, default=10.0, help="deadline of one sample")
    add("--batch-timeout-s", type=float, default=120.0, help="deadline of one request")
    return parser


def json_object(text: str) -> dict[str, Any]:
    """The object that an option is given as; argparse names this function in its refusals."""
    found = parse_json(text)
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f'{text} is no JSON object, such as {{"key": 1}}')
    return found


def _function(options: argparse.Namespace) -> FunctionSpec:
    known = [field.name for field in fields(Sandbox)]
    unknown = sorted(set(options.sandbox) - set(known))
    if unknown:
        raise ConfigError(
            f"--sandbox has {', '.join(unknown)}; there are {', '.join(known)}."
            f"{nearest(unknown[0], known)}"
        )
    sandbox = Sandbox(**options.sandbox)
    if not options.function:
        return FunctionSpec(deadline=options.sample_timeout_s, sandbox=sandbox)
    path, _, name = options.function.partition(":")
    settings = path, name or "compute_score", options.kwargs, options.sample_timeout_s
    return FunctionSpec(*settings, sandbox=sandbox, path_key="--function", name_key="--function")
