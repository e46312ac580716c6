"""usage: verl-like migrate verl|openrlhf|trl|colossalchat
           SCRIPT-OR-COMMAND [ARGUMENT ...] [--prove]

Prints every training that a shell script would start as a verl-like command:

  verl-like migrate verl run_qwen2-7b.sh
                       # main_ppo, SFT, async, one-step off-policy
  NNODES=2 verl-like migrate verl run_gemma_2b.sh 8 out
                       # variables and arguments of the script
  verl-like migrate openrlhf train_ppo_llama_ray.sh
                       # train_ppo_ray, train_sft, _rm, _dpo
  verl-like migrate trl "trl grpo --config grpo.yaml"
                       # grpo, sft, reward, dpo, kto; or a YAML
  verl-like migrate trl records/trl
                       # what RecordCallback wrote of a script's trainer
  verl-like migrate colossalchat mmmt_prompt.sh
                       # train_prompts, 1mmt_prompt, mmmt_prompt
  verl-like migrate verl python3 -m verl.trainer.main_ppo data.train_files=x ...
                       # a command: no sandbox is needed

The script runs in a sandbox where nothing trains. The shell handles variables,
loops and files, and arguments after the script go to the script. Comments below
each command list what happened to each flag: renamed, built in, or not
supported (with an alternative). A comment above it begins with "incomplete:" if
it needs something else. Defaults that differ between the two systems are set
explicitly. You can save the output as a script. A command is rejected if
leaving out one of its flags would change the experiment.

  --prove    the last argument: also compare loss and estimator with verl's or
             TRL's own functions on small batches
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

from trainer.tools.migrate.systems import migrate
from trainer.tools.migrate.translation import commented


def main(arguments: Sequence[str]) -> None:
    """Print the equivalent commands for a script or command of another framework."""
    if len(arguments) < 2 or arguments[0].startswith("-"):
        sys.exit(__doc__)
    logging.basicConfig(format="%(message)s", level=logging.ERROR)
    asks_for_proof = arguments[-1] == "--prove"
    system, source, *script_arguments = arguments[: -1 if asks_for_proof else None]
    if script_arguments and not os.path.isfile(source):  # a command
        translations = migrate(system, [source, *script_arguments])
    else:
        translations = migrate(system, source, script_arguments)
    print("\n\n".join(done.report() for done in translations), flush=True)
    if asks_for_proof:
        from trainer.tools.migrate.prove import prove

        for done in translations:
            print(f"\n{commented(prove(system, done))}", flush=True)
