"""usage: verl-like COMMAND ...   (also: COMMAND --help, --version)
train
  ppo [key=value ...]           train with PPO, GRPO and more
  async [key=value ...]         PPO that generates and trains at the same time
  sft [key=value ...]           supervised fine-tuning on chats and texts
  reward-model [key=value ...]  train a reward model on pairs
  dpo [key=value ...]           learn preferences: DPO, IPO, KTO and others
before a run
  check [key=value ...]         check settings, print the plan, start nothing
  plan [key=value ...]          propose GPUs for every role
  check-environment FILE:CLASS  play an environment without a model
  check-loss FILE.py:NAME       check a loss or estimator on small batches
  doctor                        check this machine
  make-tiny DIR, get MODEL DIR  write a tiny model, download a small one
during and after a run
  watch RUN_DIR                 follow a run in progress in a browser
  join RUN_DIR                  add this machine to a run in progress
  report RUN_DIR                write RUN_DIR/report.html again
  bisect A B                    compare two runs: where they part, and why
  replay RUN --step K           repeat a step of a run, to compare or debug
  eval MODEL [key=value ...]    validate a model or a run's model
  chat MODEL                    talk to a model or a run's model
  export CHECKPOINT OUT         write a trained model as a Hugging Face folder
serve, and move from another framework
  serve MODEL, serve-reward     serve a model to Tinker's SDK, or a reward
  migrate SYSTEM FILE           translate a script of verl, TRL and others
Every key with its meaning: RECIPE --cfg all   (RECIPE: a command under train)
First try: verl-like make-tiny --help  (guides: docs/index.md in the clone)
"""

from __future__ import annotations

# a subcommand is imported only when it is chosen, so that the help is fast
import ast
import os
import sys
from collections.abc import Callable
from pathlib import Path

from verl_like.lazy import check_not_hidden
from verl_like.terminal import exit_on_broken_pipe, printable

RECIPES = {
    "ppo": "trainer.ppo.recipe.PPO",
    "sft": "trainer.sft.recipe.SFT",
    "reward-model": "trainer.reward_model.recipe.REWARD_MODEL",
    "dpo": "trainer.preference.recipe.DPO",
    "async": "trainer.async_training.recipe.ASYNC",
}
"""Commands that run a recipe."""
OTHERS = """
    check plan check-environment check-loss doctor make-tiny get serve serve-reward
    migrate report watch bisect replay eval chat export join
""".split()
"""The other commands, each with a module of its name in this folder."""
COMMANDS = RECIPES | {name: f"trainer.cli.{name.replace('-', '_')}.main" for name in OTHERS}
"""Command -> its recipe, or a function of its arguments; the module's docstring is its help."""
ASKS_FOR_HELP = {"-h", "--help"}
PREFERENCE_LOSSES = {"hinge", "ipo", "kto", "orpo", "simpo"}
OTHER_WORDS = {
    "train": ["ppo"],
    "explain": ["check", "--full"],
    "rm": ["reward-model"],
    "compare": ["bisect"],
}


def main() -> None:
    """Dispatch `sys.argv` to a subcommand."""
    # modules of the current folder are importable, with the lowest priority
    here = os.getcwd()
    if "" not in sys.path and here not in sys.path:
        ours = str(Path(__file__).resolve().parents[2])
        if ours not in sys.path:  # an older editable install has an import hook, tried last
            sys.path.append(ours)
        sys.path.append(here)
    try:
        check_not_hidden(("trainer", "workers"))
    except ImportError as error:
        sys.exit(f"error: {error}")
    command, *arguments = sys.argv[1:] or ["--help"]
    resolved = resolve_command(command)
    if resolved:
        print(f"note: verl-like {command} runs verl-like {' '.join(resolved)}", file=sys.stderr)
        command, arguments = resolved[0], [*resolved[1:], *arguments]
    # commands with processes detect a child's death by an error on its pipe, and servers a closed
    # connection, so they must not end silently on such an error
    serves = ("serve", "serve-reward", "watch")
    works = command in ("check", "eval", "replay", "chat", "doctor", *serves, *RECIPES)
    if not works or {*ASKS_FOR_HELP, "--cfg"} & set(arguments):
        exit_on_broken_pipe()
    if command == "help":
        command = "--help"
    if command == "--help" and arguments[:1] and arguments[0] in COMMANDS:
        command, arguments = arguments[0], ["--help"]
    if command in ASKS_FOR_HELP:
        print((__doc__ or "").rstrip())
    elif command == "--version":
        from importlib.metadata import version

        print(version("verl-like"))
    elif command == "-sc":  # a shell asks for completions; Hydra knows no subcommands
        from trainer import main_ppo

        os.environ["COMP_LINE"] = os.environ.get("COMP_LINE", "").replace(" ppo", "", 1)
        main_ppo.main()
    elif command not in COMMANDS:
        from verl_like.errors import nearest

        hint = nearest(command, COMMANDS) or " verl-like --help lists the commands."
        sys.exit(f"error: there is no command {command!r}.{hint}")
    elif ASKS_FOR_HELP & set(arguments):
        print(command_help(command))
    else:
        from verl_like.errors import VerlLikeError
        from verl_like.process.garbage import pause_collection
        from verl_like.registry import load_object

        try:
            with pause_collection():
                target = load_object(COMMANDS[command], command)
            if command in RECIPES:
                from trainer.recipe_command import run_command

                run_command(target, arguments)
            else:
                run_with_local_paths(command, target, arguments)
        except VerlLikeError as err:
            sys.exit(f"error: {printable(str(err))}")


def command_help(command: str) -> str:
    """Return the help of a command, the docstring of its module, without importing it."""
    module = COMMANDS[command].rpartition(".")[0]
    file = Path(__file__).resolve().parents[2] / f"{module.replace('.', '/')}.py"
    return ast.get_docstring(ast.parse(file.read_bytes())) or ""


NEEDS = {"report": "records", "bisect": "records", "replay": "all"}
"""Commands that read runs -> which files of a remote run they need; others need weights."""


def run_with_local_paths(
    command: str, target: Callable[[list[str]], None], arguments: list[str]
) -> None:
    """Run a command with local copies of remote folders; upload what it writes into them."""
    from verl_like.files import is_remote

    if command not in (*NEEDS, "eval", "chat", "export") or not any(map(is_remote, arguments)):
        target(arguments)
        return
    from tempfile import TemporaryDirectory

    from trainer.run_folder.folder import REPORT_FILE as PAGE
    from trainer.run_folder.remote import fetched_run, upload

    with TemporaryDirectory(prefix="verl-like-") as scratch:
        remote = [argument for argument in arguments if is_remote(argument)]
        outputs = []
        if command == "export" and is_remote(arguments[-1]):
            outputs = [remote.pop()]
        needs = NEEDS.get(command, "weights")
        local = {url: str(fetched_run(url, needs)) for url in remote}
        local |= {url: f"{scratch}/export" for url in outputs}
        target([local.get(argument, argument) for argument in arguments])
        written = {url: Path(local[url]) for url in outputs}
        if command == "report":
            written = {f"{url.rstrip('/')}/{PAGE}": Path(local[url], PAGE) for url in remote}
        for url, path in written.items():
            upload(path, url)
            print(f"uploaded to {url}")


def resolve_command(name: str) -> list[str]:
    """Return the command that an algorithm, preference loss or other word stands for, or []."""
    if name in COMMANDS:
        return []
    presets = Path(__file__).resolve().parents[1] / "ppo" / "algorithm"
    if (presets / f"{name}.yaml").is_file():
        return ["ppo", f"algorithm={name}"]
    if name in PREFERENCE_LOSSES:
        return ["dpo", f"loss={name}"]
    return OTHER_WORDS.get(name, [])


if __name__ == "__main__":
    main()
