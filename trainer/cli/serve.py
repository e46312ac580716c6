"""usage: verl-like serve MODEL [--host HOST] [--port PORT] [--token KEY]
           [--stable-reinforce LOSS] [key=value ...]

Serves a model to scripts that use the `tinker` SDK, unchanged:

  verl-like serve Qwen/Qwen3-8B placement=split trainer.n_gpus_per_node=8
  TINKER_BASE_URL=http://127.0.0.1:8000 TINKER_API_KEY=tml-any python script.py

The script owns data, loss and loop, the server owns the weights. Keys are those of a run:

  placement=colocate|split  resource_pool_spec.rollout_pool=[6]   where roles are
  actor_rollout_ref.model.lora_rank=0     train all weights, for one client; 32: adapters
  data.max_prompt_length=1024  data.max_response_length=1024
  trainer.default_local_dir=FOLDER        where checkpoints go, as run folders
  trainer.backend=ray|local

It listens on this machine alone (port 8000; 0 takes a free one). With --host it asks for --token,
a key that begins with tml-; TLS is a proxy's work. --stable-reinforce=importance_sampling computes
that loss where a script asks for stable_reinforce, which has no public formula.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Sequence

from trainer.command_errors import ending_in_words
from trainer.config.compose import load_config
from trainer.recipe_command import is_setting
from trainer.serve.desk import check_key
from trainer.serve.recipe import SERVE, prepare
from trainer.serve.server import serve
from workers.roles.served import client_loss


def main(arguments: Sequence[str]) -> None:
    """Serve until SIGINT or SIGTERM."""
    settings = [argument for argument in arguments if is_setting(argument)]
    parser = argparse.ArgumentParser("verl-like serve")
    add = parser.add_argument
    add("model")
    add("--host", default="127.0.0.1")
    add("--port", type=int, default=8000)
    add("--token", default="")
    add("--stable-reinforce", default="")
    options = parser.parse_args([each for each in arguments if each not in settings])
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    with ending_in_words():
        check_key(options.host, options.token)
        aliases = {}
        if options.stable_reinforce:
            client_loss(options.stable_reinforce)
            aliases["stable_reinforce"] = options.stable_reinforce
        config = load_config([f"actor_rollout_ref.model.path={options.model}", *settings], SERVE)
        prepare(config)
        serve(config, options.host, options.port, options.token, aliases)
