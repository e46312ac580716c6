r"""usage: verl-like serve-reward [--function FILE.py[:NAME]] [--kwargs JSON]
           [--sandbox JSON] [--host HOST] [--port PORT] [--token-env NAME]
           [--sample-timeout-s S] [--batch-timeout-s S] [--trust-programs]

Loads a reward function, prints the address, and serves until it gets SIGINT or
SIGTERM. Then a run calls it:

  verl-like serve-reward --function reward.py:score --port 8000
  verl-like ppo ... \
    reward.list='[{name: my, kind: remote, url: "http://127.0.0.1:8000/score"}]'

The scores equal those of a run with the same function and sandbox.

  --function FILE.py:NAME   default: the rule of each sample's data_source
  --kwargs JSON             more arguments of the function
  --sandbox JSON            keys of reward.sandbox
  --host HOST               default: only this machine; another HOST needs
                            --token-env
  --port PORT               default: 8000; 0 picks a free port
  --token-env NAME          the environment variable that holds a secret
  --sample-timeout-s S      seconds for a sample (default: 10)
  --batch-timeout-s S       seconds for a batch (default: 120)
  --trust-programs          as reward.trust_programs
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import fields, replace

from trainer.cli.check_environment import json_object
from verl_like.errors import ConfigError, nearest
from verl_like.process.machine import ON_THIS_MACHINE
from verl_like.process.sandbox import Sandbox
from verl_like.terminal import usage_text
from workers.rewards.remote import RewardServer
from workers.rewards.scorer import FunctionSpec, trust_kwargs


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    options = _parser().parse_args(arguments)
    token = secret_in(options.token_env)
    if options.host not in ON_THIS_MACHINE and not token:
        raise ConfigError(
            f"--host={options.host} is open to other machines. Set a secret with "
            "--token-env=NAME, the name of an environment variable."
        )

    spec = _function(options)
    try:
        server = RewardServer(spec, options.host, options.port, token, options.batch_timeout_s)
    except OSError as err:
        raise ConfigError(f"cannot listen on {options.host}:{options.port}: {err}") from err

    for number in (signal.SIGINT, signal.SIGTERM):
        # in a thread, because shutdown waits for the loop that the signal interrupts
        signal.signal(number, lambda *_: threading.Thread(target=server.shutdown).start())
    print(f"{spec} answers at {server.url}", flush=True)
    try:
        server.serve_forever()
    finally:
        server.server_close()


def secret_in(variable: str) -> str:
    """Return the secret in the environment variable that `--token-env` names; "" for none."""
    secret = os.environ.get(variable, "") if variable else ""
    if variable and not secret:
        raise ConfigError(
            f"--token-env={variable}: this environment variable is not set, or empty."
        )
    return secret


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like serve-reward", usage_text(__doc__))
    add = parser.add_argument
    add("--function", default="")
    add("--kwargs", type=json_object, default={})
    add("--sandbox", type=json_object, default={})
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--token-env", default="")
    add("--sample-timeout-s", type=float, default=10.0)
    add("--batch-timeout-s", type=float, default=120.0)
    add("--trust-programs", action="store_true")
    return parser


def _function(options: argparse.Namespace) -> FunctionSpec:
    """Return the reward function that the options name, or the built-in rules."""
    known = [field.name for field in fields(Sandbox)]
    unknown = sorted(set(options.sandbox) - set(known))
    if unknown:
        raise ConfigError(
            f"--sandbox: unknown {', '.join(unknown)}. Known: {', '.join(known)}."
            f"{nearest(unknown[0], known)}"
        )
    sandbox = Sandbox.from_limits(options.sandbox)
    if not options.function:
        spec = FunctionSpec(deadline=options.sample_timeout_s, sandbox=sandbox)
        return replace(spec, kwargs=trust_kwargs(spec.path, spec.name, options.trust_programs))
    path, _, name = options.function.partition(":")
    name = name or "compute_score"
    trust = trust_kwargs(path, name, options.trust_programs)
    if options.trust_programs and not trust:
        raise ConfigError(
            "--trust-programs applies to the rule that runs programs, but "
            f"--function={options.function} scores the responses. Leave one of them out."
        )
    settings = path, name, options.kwargs | trust, options.sample_timeout_s
    return FunctionSpec(*settings, sandbox=sandbox, path_key="--function", name_key="--function")
