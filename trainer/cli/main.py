"""The console command `verl-like`. Starts fast: a subcommand's imports happen once it is chosen."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from verl_like.terminal import end_with_the_reader, fit, terminal_width

USAGE = """usage: verl-like COMMAND ...

  ppo [key=value ...]           train by PPO, GRPO and their kin
  detached [key=value ...]      PPO, with makers that generate beside it
  sft [key=value ...]           supervised fine-tuning on chats and texts
  reward-model [key=value ...]  train a reward model on pairs
  dpo [key=value ...]           learn preferences: DPO, IPO, KTO and others
  best-of-n [key=value ...]     a model's best answers as rows for sft or dpo
                                (of these --cfg all shows all keys)
  explain [key=value ...]       say in words what a step of ppo will do
  bench overlap [RUN_DIR]       predict what detached makers would gain a job
  doctor [--model PATH]         what a run needs, or does with a model
  make-tiny DIR                 a model and data for trying things
  serve-reward [...]            answer reward requests over HTTP
  migrate SYSTEM FILE           a script of verl's, TRL's, ... in our keys
  report RUN_DIR                write RUN_DIR/report.html anew
  compare RUN RUN ...           runs side by side: settings, curves, times
  replay RUN --step K           a step of a run once more, to compare or debug
  eval MODEL [key=value ...]    validate a model, or that of a run
  chat MODEL                    talk to a model, or to that of a run
  export CHECKPOINT OUT         a trained model as a Hugging Face folder
  -sc install=bash              print tab completion, for eval "$(...)"
  --version                     print the version
"""
RECIPES = {
    "sft": "trainer.sft.recipe.SFT",
    "reward-model": "trainer.reward_model.recipe.REWARD_MODEL",
    "dpo": "trainer.preference.recipe.DPO",
    "best-of-n": "trainer.best_of_n.recipe.BEST_OF_N",
    "detached": "trainer.detached.recipe.DETACHED",
}
"""Commands that train, but for `ppo`, which is Hydra's."""
MODULES = {
    "serve-reward": "trainer.cli.serve_reward",
    "explain": "trainer.cli.explain",
    "chat": "trainer.cli.chat",
    "compare": "trainer.cli.compare",
    "eval": "trainer.cli.eval",
    "export": "trainer.cli.export",
    "make-tiny": "trainer.cli.make_tiny",
    "replay": "trainer.cli.replay",
}
"""Commands whose module has a `main(arguments)`."""
ASKS_FOR_HELP = {"-h", "--help"}
HELP = {
    "detached": """usage: verl-like detached data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

PPO whose samples are made beside the training: makers generate on pools of their own, the trainer
takes batches from a buffer and sends its weights back. All keys of `verl-like ppo`, and:

  detached.makers=2  detached.trainers=1   or detached.topology=2m1t
  detached.max_staleness=1                 versions that a sample may be old; 0 is synchronous
  verl-like detached --cfg all             every key with its meaning
""",
    "sft": """usage: verl-like sft data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on chats (loss on what the assistant says), prompts with responses, or plain text.
Placement, run folder, checkpoints and resume are those of `verl-like ppo`.

  verl-like sft --cfg all           every key with its meaning
  trainer.dry_run=true              check everything, and stop before a process starts
  checkpoint.save_contents=[model,optimizer,extra,hf_model]  trainer.save_freq=100
""",
    "reward-model": """usage: verl-like reward-model data.train_files=FILE model.path=FOLDER
           [key=value ...]

Trains a reward model on pairs: a `chosen` and a `rejected` response, with their `prompt` or as
whole dialogues, and a `margin` where there is one. Placement, run folder, checkpoints and resume
are those of `verl-like ppo`, whose reward_model.model.path and critic.model.path load the folder
that hf_model exports.

  verl-like reward-model --cfg all  every key with its meaning
  trainer.dry_run=true              check everything, and stop before a process starts
  checkpoint.save_contents=[model,optimizer,extra,hf_model]  trainer.save_freq=100
""",
    "dpo": """usage: verl-like dpo data.train_files=FILE model.path=FOLDER [key=value ...]

Trains a model on pairs (chosen, rejected), or on responses with a label (loss=kto). The reference
is the model before training, or that of ref.model.path; its log-probs are computed once.

  loss=dpo|cdpo|ipo|hinge|kto|orpo|simpo   what is learned; orpo and simpo have no reference
  beta=0.1  sft_coef=0                     how much a log-ratio counts; SFT on the chosen beside it
  verl-like dpo --cfg all                  every key with its meaning
""",
    "best-of-n": """usage: verl-like best-of-n data.train_files=FILE
           actor_rollout_ref.model.path=FOLDER [key=value ...]

Draws actor_rollout_ref.rollout.n responses of every prompt (rejection sampling), scores them by the
rewards of `verl-like ppo`, and writes the best ones, which `verl-like sft` reads; or pairs of best
and worst. A killed run goes on where it was.

  actor_rollout_ref.rollout.n=16  selection.top_k=2  selection.min_score=0.5
  selection.write=pairs             prompt, chosen, rejected
  selection.file=best.parquet       or .jsonl; by default selected.jsonl in the run folder
  verl-like best-of-n --cfg all     every key with its meaning
""",
    "explain": """usage: verl-like explain [--card-gb=GIB] [key=value ...]
       verl-like explain detached [--measured=RUN_DIR] [key=value ...]

Takes the same key=value settings as `verl-like ppo` and prints, without starting a process: the
calls of a step with what each waits for, which run at the same time, who runs where, every batch
size with its unit, each key that is not at its default with its meaning, and the keys that have no
effect in this run. Memory of every role is that of this machine's devices, or of GPUs with
--card-gb GiB, which need not be here.

Of a detached run also who makes and who trains, how far makers run ahead, and, from the seconds of
the PPO run in RUN_DIR, how long a step will take and what limits it.

  verl-like explain placement=split trainer.n_gpus_per_node=8 \\
      data.train_files=x actor_rollout_ref.model.path=y
""",
    "doctor": """usage: verl-like doctor [--model PATH]

One line for each thing that a run needs: ok, FAIL, or - for what only some runs need. A line that
says FAIL ends with the command that mends it. Takes 10 to 20 seconds; the exit code is 1 if
anything needed fails.

With --model, for one model folder (or name on the hub) which path each part of a run takes and why:
attention, packed or padded rows, rollout engines, fused CPU functions, the state that is loaded.
Only its config.json is needed.
""",
    "serve-reward": """usage: verl-like serve-reward [--function FILE.py[:NAME]] [--kwargs JSON]
           [--sandbox JSON] [--host HOST] [--port PORT] [--token-env NAME]
           [--sample-timeout-s S] [--batch-timeout-s S]

Loads a reward function, prints the address, and answers until it gets SIGINT or SIGTERM. Without
--function the rule of each sample's data_source scores it. A run asks it by

  rewards='[{name: judge, kind: remote, url: "http://127.0.0.1:8000/score"}]'

with the same numbers as the function in process, and in the same sandbox, whose keys --sandbox
sets. It listens on this machine alone (port 8000; 0 takes a free one), unless --host and a secret
in the environment variable --token-env are given.
""",
    "migrate": """usage: verl-like migrate verl|openrlhf|trl|coati COMMAND-OR-FILE

Reads a command line, or a file that has one, and prints the same run as a command of ours. Below it
stands what became of every flag: renamed, always so here, or not here and what to do instead; and
those of its defaults that differ from ours, which the command sets.

  verl-like migrate verl run_qwen2-7b.sh                   verl.trainer.main_ppo
  verl-like migrate openrlhf train_ppo_llama_ray.sh        train_ppo_ray, both generations of flags
  verl-like migrate trl "trl grpo --config grpo.yaml"      grpo, sft, reward, dpo; also a YAML alone
  verl-like migrate coati mmmt_prompt.sh                   train_prompts, 1mmt_prompt, mmmt_prompt
""",
    "chat": """usage: verl-like chat MODEL [--system TEXT] [--max-tokens N] [--temperature T]
           [--seed N]

MODEL is a model folder, a run folder (its newest checkpoint), or a global_step_N in one. On a
terminal it asks for messages (/new begins anew, Ctrl-D ends) and shows the answers while they are
made. From a pipe the whole input is one message, and the answer is all that is printed:

  echo "say b" | verl-like chat runs/letters --max-tokens 20
""",
    "compare": """usage: verl-like compare RUN RUN ... [--page FILE]

Reads two run folders or more, whatever state they are in, and prints: how each ended, the keys that
are set differently, every metric at its end and at its best (mean and deviation of runs that differ
in trainer.seed alone), the phases of a step, and the placements. The page, comparison.html here
unless --page names another, has the same tables and every curve of all runs on one axis.
""",
    "replay": """usage: verl-like replay RUN --step K [--stage score|estimate|update] [--break]
           [--from-start] [--backend local|run]

Goes on from the newest checkpoint before step K of the run folder RUN, in a folder of its own, and
makes step K again: same samples, same numbers. Prints every number and every kept batch that is not
as it was, bit for bit; the exit code is then 1. RUN is only read.

  --stage update     that stage alone, of the batch that trainer.max_batches_to_keep left in RUN,
                     or else of one that the stages before it make
  --break            the debugger, right before; roles of one process run in this one: breakpoint()
                     works in their code, too
  --from-start       where no earlier checkpoint is left: all K steps, from the beginning
  --backend run      the run's own backend; local needs no cluster, with as many processes
""",
    "eval": """usage: verl-like eval MODEL [key=value ...]

MODEL is a model folder, a run folder (its newest checkpoint), or a global_step_N in one. Samples of
every prompt of data.val_files are scored, and mean@n, best@n and maj@n of each data source printed:
the numbers of a validation in a run. A run of `verl-like ppo` brings its own prompts, rewards,
sampling and seed, over which the settings given here go.

  data.val_files=[a.parquet,b.jsonl]
  actor_rollout_ref.rollout.val_kwargs.n=8  actor_rollout_ref.rollout.val_kwargs.do_sample=true
  trainer.default_local_dir=FOLDER   samples, metrics and report; by default eval/ in the run
  verl-like eval --cfg all           every key with its meaning
""",
    "make-tiny": """usage: verl-like make-tiny DIR [--seed N] [--num-train N] [--num-val N]
           [--hidden-size N] [--num-layers N] [--gsm8k]

Writes DIR/model, a Llama of random weights with a character tokenizer, DIR/train.parquet and
DIR/val.parquet: prompts ask for a letter, and the reward is its share of the response. A run learns
it in some tens of steps. --gsm8k also writes made-up sums in the format of GSM8K's own files.

  verl-like make-tiny tiny
  verl-like ppo trainer.backend=local actor_rollout_ref.model.path=tiny/model \\
      data.train_files=tiny/train.parquet data.val_files=tiny/val.parquet \\
      data.max_prompt_length=16 data.max_response_length=8 trainer.total_training_steps=20
""",
    "export": """usage: verl-like export CHECKPOINT OUT [--role ROLE] [--adapter] [--average]
           [--model BASE]

Writes the folder OUT, which `from_pretrained` and vLLM load, of a run folder's newest checkpoint or
of the global_step_N that is named; LoRA is merged. It needs no GPU and no cluster, whatever number
of ranks wrote the checkpoint, and the run need not have saved hf_model.

  --role critic    whose model; by default the policy
  --adapter        the LoRA adapter for peft, not merged
  --average        the moving average of the weights (actor.ema_decay)
  --model BASE     the folder that it was trained from, where that has moved
""",
    "bench": """usage: verl-like bench overlap RUN_DIR
       verl-like bench overlap --gen 1.2 --score 0.3 --update 0.8 --sync 0.1
           [--makers 1,2] [--trainers 1] [--staleness 0,1,4] [--json] ...

Predicts a detached run, whose makers generate while its trainer trains, from the seconds that the
phases took in a run, or from those given: seconds a step, speed-up over the synchronous run, who
is idle, what limits, for fewer and more makers. A simulation: nothing is started.

  --pieces 4          of a batch, each made by one maker; by default as many as makers
  --limit 8           pieces that may be queued or in the making at once
  --at-once           makers take new weights in the middle of a piece
  --fixed-share 0.5   of generation, that fewer rows do not shorten: the longest response's
""",
    "report": """usage: verl-like report RUN_DIR

Writes RUN_DIR/report.html: one file that opens in any browser without a network. A run writes its
own report when it ends, also when it fails; this command makes it anew, of a run that still goes on
as well.
""",
}


def main() -> None:
    """Dispatch `sys.argv` to a subcommand."""
    find_modules_here()
    command = sys.argv[1] if len(sys.argv) > 1 else "--help"
    arguments = sys.argv[2:]
    if only_prints(command, arguments):
        end_with_the_reader()
    if command in ("-h", "--help"):
        _show(USAGE)
    elif command == "ppo" and ASKS_FOR_HELP & set(arguments):
        from trainer.ppo.help_text import HELP as OF_PPO

        _show(OF_PPO)
    elif command in HELP and ASKS_FOR_HELP & set(arguments):
        _show(HELP[command])
    elif command == "--version":
        from importlib.metadata import version

        print(version("verl-like"))
    elif command in ("ppo", "-sc"):
        from trainer import main_ppo

        if command == "ppo":
            del sys.argv[1]
        else:  # a shell asks for completions; Hydra knows no subcommands
            os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" ppo", "", 1)
        main_ppo.main()
    elif command in HELP:
        _plain_command(command, arguments)
    else:
        from verl_like.errors import nearest

        hint = nearest(command, ["ppo", *HELP])
        sys.exit(f"verl-like: no command {command!r}.{hint}\n{USAGE}")


def find_modules_here() -> None:
    """Let modules of the current folder be imported, after all else: namesakes do no harm."""
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        ours = str(Path(__file__).resolve().parents[2])
        if ours not in sys.path:  # an editable install has a finder instead, which is asked last
            sys.path.append(ours)
        sys.path.append(here)


def only_prints(command: str, arguments: list[str]) -> bool:
    """Whether a command starts no process that it writes to.

    Others hear of a child's death by an error on its pipe, and must not end without a word then.
    """
    works = command in ("ppo", "eval", "replay", "chat", "doctor", "serve-reward", *RECIPES)
    return not works or bool({*ASKS_FOR_HELP, "--cfg"} & set(arguments))


def _show(text: str) -> None:
    print(fit(text.rstrip(), terminal_width()))


def _plain_command(command: str, arguments: list[str]) -> None:
    """Any command but ppo; an error of ours ends with its one line."""
    from verl_like.errors import VerlLikeError
    from verl_like.registry import load_object

    wanted = {"doctor": (0, 2), "report": (1, 1), "migrate": (2, 2)}.get(
        command, (0, len(arguments))
    )
    is_doctor_wrong = command == "doctor" and arguments[:1] != ["--model"][: len(arguments)]
    if not wanted[0] <= len(arguments) <= wanted[1] or is_doctor_wrong or arguments == ["--model"]:
        sys.exit(HELP[command])
    try:
        if command in RECIPES:
            from trainer.recipe_command import run_command

            run_command(load_object(RECIPES[command], command), arguments)
        elif command == "doctor":
            _doctor(*arguments[1:])
        elif command == "report":
            from trainer.report.page import write_report

            print(write_report(arguments[0]))
        elif command == "migrate":
            from trainer.cli import migrate

            migrate.main(*arguments)
        elif command == "bench":
            from trainer.cli import bench

            if arguments[:1] != ["overlap"]:
                sys.exit(HELP[command])
            bench.main(arguments[1:])
        else:
            load_object(f"{MODULES[command]}.main", command)(arguments)
    except VerlLikeError as err:
        sys.exit(f"error: {err}")


def _doctor(model: str = "") -> None:
    """What a run needs; or, of one model, which path each part of a run takes."""
    from trainer.cli import doctor

    if model:
        from trainer.cli.doctor_model import model_findings

        doctor.main(lambda: model_findings(model), passed="found on a small model of its class")
    else:
        doctor.main()


if __name__ == "__main__":
    main()
