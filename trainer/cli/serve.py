r"""usage: verl-like serve MODEL [--host HOST] [--port PORT] [--token-env NAME]
           [--stable-reinforce LOSS] [key=value ...]

Serves a model to scripts that use the `tinker` SDK, unchanged:

  verl-like serve Qwen/Qwen3-8B placement=split trainer.backend=ray \
      trainer.n_gpus_per_node=8
  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python script.py

The script owns data, loss and loop, the server owns the weights. Keys are those
of a run:

  placement=colocate|split             the pools of the roles, such as
                                       resource_pool_spec.rollout_pool=[6]
  actor_rollout_ref.model.lora_rank=0  train all weights, for one client; by
                                       default, each client trains an adapter
  data.max_prompt_length=1024  data.max_response_length=1024
  trainer.default_local_dir=FOLDER     the folder of checkpoints
  trainer.backend=ray|local

By default, the server listens only on this machine, and rejects requests of web
pages. If you open it to other machines, put a TLS proxy in front of it.

  --host HOST        default: only this machine; another HOST needs a key
  --port PORT        default: 8000; 0 picks a free port
  --token-env NAME   the environment variable that holds the key, which must
                     begin with tml-
  --token KEY        the key itself, which other users of this machine see in
                     the list of processes
  --stable-reinforce importance_sampling
                     compute this loss for stable_reinforce, whose formula is
                     not public
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from trainer.cli.serve_reward import secret_in
from trainer.config.compose import load_config
from trainer.recipe_command import exit_on_error, is_setting
from trainer.serve.recipe import SERVE, prepare
from verl_like.errors import ConfigError
from verl_like.process.machine import ON_THIS_MACHINE
from verl_like.terminal import usage_text
from workers.roles.served import client_loss

KEY_PREFIX = "tml-"


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = [argument for argument in arguments if is_setting(argument)]
    parser = argparse.ArgumentParser("verl-like serve", usage_text(__doc__))
    add = parser.add_argument
    add("model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    tokens = parser.add_mutually_exclusive_group()
    tokens.add_argument("--token", default="")
    tokens.add_argument("--token-env", default="")
    add("--stable-reinforce", default="")
    options = parser.parse_args([word for word in arguments if word not in settings])
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with exit_on_error():
        try:
            from trainer.serve.app import serve
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"verl-like serve needs the package {error.name}. Install it with: "
                "pip install -e '.[serve]'"
            ) from error
        token = options.token or secret_in(options.token_env)
        check_key(options.host, token)
        aliases = {}
        if options.stable_reinforce:
            client_loss(options.stable_reinforce)
            aliases["stable_reinforce"] = options.stable_reinforce
        config = load_config([f"actor_rollout_ref.model.path={options.model}", *settings], SERVE)
        prepare(config)
        serve(config, options.host, options.port, token, aliases)


def check_key(host: str, token: str) -> None:
    """Reject an address that other machines reach without a key, and a key that the SDK rejects."""
    if token and not token.startswith(KEY_PREFIX):
        raise ConfigError(f"the key must begin with {KEY_PREFIX!r}: the SDK sends no other keys.")
    if host not in ON_THIS_MACHINE and not token:
        raise ConfigError(
            f"--host={host} is open to other machines. Set a key with --token-env=NAME, the name "
            f"of an environment variable with {KEY_PREFIX}SECRET, which clients set as "
            "TINKER_API_KEY, and put a TLS proxy in front of the server."
        )
