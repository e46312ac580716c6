r"""usage: verl-like serve MODEL [--host HOST] [--port PORT] [--token KEY]
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

By default, the server listens only on this machine (port 8000; 0 picks a free
port). To open it to other machines, set --host and a key with --token (it must
begin with tml-), and put a TLS proxy in front of it. The loss stable_reinforce
has no public formula: with --stable-reinforce=importance_sampling the server
computes that loss instead.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from trainer.cli.serve_reward import ON_THIS_MACHINE
from trainer.config.compose import load_config
from trainer.recipe_command import exit_on_error, is_setting
from trainer.serve.recipe import SERVE, prepare
from trainer.serve.server import serve
from verl_like.errors import ConfigError
from verl_like.terminal import usage_of
from workers.roles.served import client_loss

KEY_PREFIX = "tml-"


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = [argument for argument in arguments if is_setting(argument)]
    parser = argparse.ArgumentParser("verl-like serve", usage_of(__doc__))
    add = parser.add_argument
    add("model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--token", default="")
    add("--stable-reinforce", default="")
    options = parser.parse_args([word for word in arguments if word not in settings])
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with exit_on_error():
        check_key(options.host, options.token)
        aliases = {}
        if options.stable_reinforce:
            client_loss(options.stable_reinforce)
            aliases["stable_reinforce"] = options.stable_reinforce
        config = load_config([f"actor_rollout_ref.model.path={options.model}", *settings], SERVE)
        prepare(config)
        serve(config, options.host, options.port, options.token, aliases)


def check_key(host: str, token: str) -> None:
    """Reject an address that other machines reach without a key, and a key that the SDK rejects."""
    if token and not token.startswith(KEY_PREFIX):
        raise ConfigError(
            f"the key of --token must begin with {KEY_PREFIX!r}: the SDK sends no other keys."
        )
    if host not in ON_THIS_MACHINE and not token:
        raise ConfigError(
            f"--host={host} is open to other machines. Set a key with --token={KEY_PREFIX}SECRET, "
            "which clients set as TINKER_API_KEY, and put a TLS proxy in front of the server."
        )
