"""Run a shell script with recorders in place of the programs that train; return their commands.

    recording = record("train.sh", ["8"])
    recording.commands[0].words          # ["python3", "-m", "verl.trainer.main_ppo", ...]

The shell takes care of variables, arrays, loops, files and other scripts. A variable that nobody
sets and that the script only passes on stays a variable, `$NAME`, so that you can paste the
translation where it is set. API keys and access tokens also stay variables.

`record` starts a process with `main`, and sends it a `Script`. Bash runs the script as it is, but
`recorder.sh` has functions instead of `python`, `torchrun`, `ray` and everything else that trains,
moves files or waits. The script can write only into a scratch folder, which holds links to the
user's files. It has no network, and limits on memory, time and processes.
"""

from __future__ import annotations

import ast
import itertools
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.kernel_limits import isolate_network, restrict_writes
from verl_like.process.sandbox import MARK, Sandbox, remove_folder
from verl_like.process.supervisor import (
    adopt_orphans,
    die_with_parent,
    fork_confined,
    watch,
)

CONTINUATION = re.compile(r"\\[ \t]+(?:#[^\n]*)?(?:\n|\Z)")
"""A backslash before blanks or a comment at the end of a line, where bash ends the command."""
NUMBERED = re.compile(r"[ \t]*(\d+)[ \t]+(?=\S)")
"""The number of a line, before the line."""
COMMAND_LINE = re.compile(
    r"(?m)^\s*((?:\w+=\S+ )*(?:accelerate launch|python3?|trl \w+|torchrun|deepspeed) .*--.*)$"
)
"""A command with flags, in a docstring."""
SENTENCE = re.compile(r"(?:\b[A-Za-z]+,? ){6}|[\u3400-\u9fff]{6}")
"""Six words or Chinese characters in a row."""
SECRET = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD)$")
MARKED = re.compile("\2[$](\\w+)\3")
"""Pattern of the value that the script sees for a variable that stays `$NAME`; it marks the `$`."""
MARKED_BY_BASH = re.compile(r"\$'\\002(\$\w+)\\003([^']*)'")
"""`MARKED` as bash prints it."""
REFERENCE = re.compile(r"\$\{?([A-Za-z_]\w*)")
BASH_VARIABLES = frozenset(
    """
    BASH BASHPID BASH_REMATCH BASH_SOURCE BASH_VERSION COLUMNS DIRSTACK EPOCHREALTIME EPOCHSECONDS
    EUID FUNCNAME GROUPS HOSTNAME HOSTTYPE IFS LINENO LINES MACHTYPE OLDPWD OPTARG OPTIND OSTYPE
    PIPESTATUS PPID PWD RANDOM REPLY SECONDS SHELLOPTS SHLVL UID
    """.split()
)
"""Variables that bash sets."""
PASS_THE_COMMAND = (
    "Pass the training command itself; your shell expands its variables: "
    "verl-like migrate SYSTEM python3 -m ..."
)


def record(source: str, arguments: Sequence[str] = ()) -> Recording:
    """Return the commands that a script, or its text, runs in this folder with these arguments."""
    folder, raw = os.getcwd(), source_text(source)
    listing = without_line_numbers(raw)
    if is_python(source):
        listing = "\n".join(docstring_commands(raw))
    text, name = CONTINUATION.sub("\\\n", listing), "command.sh"
    if raw is not source:
        path = os.path.abspath(source)
        name = os.path.relpath(path, folder) if Path(path).is_relative_to(folder) else path
    words = ["-c", "--", text, name] if raw is source or text != raw else [name]

    read, others = unset_variables(text, os.environ)
    environment = {**os.environ, **{variable: f"\2${variable}\3" for variable in read}}
    process, pipe = start_child("trainer.tools.migrate.recorder")
    try:
        pipe.send(Script([*words, *arguments], folder, environment))
        answer = pipe.recv()
    except (EOFError, OSError) as err:
        raise ConfigError(
            f"the process that runs the script ended without a result. {PASS_THE_COMMAND}"
        ) from err
    finally:
        pipe.close()
        process.wait()
    if isinstance(answer, str):
        raise ConfigError(
            "the script was not run, because its sandbox could not be set up: "
            f"{answer.removesuffix('.')}. {PASS_THE_COMMAND}"
        )
    assert isinstance(answer, Recording), answer
    variables = MARKED.findall(
        "\n".join(word for command in answer.commands for word in command.words)
    )
    return replace(
        answer,
        commands=[
            replace(command, words=[MARKED.sub(r"$\1", word) for word in command.words])
            for command in answer.commands
        ],
        printed=MARKED_BY_BASH.sub(r"\1\2", MARKED.sub(r"$\1", answer.printed)),
        variables=sorted(set(variables)),
        unset=sorted({*others, *read} - {*variables, *os.environ}),
        num_numbered=0 if listing == raw or is_python(source) else len(raw.splitlines()),
    )


def source_text(source: str) -> str:
    """Return the file's text; a source that names no file is the text itself."""
    if os.path.isfile(source):
        return Path(source).read_text(encoding="utf-8", errors="replace")
    if Path(source).suffix and not re.search(r"\s", source.strip()):
        raise ConfigError(f"there is no file {source}. Use a script, or a command in quotes.")
    return source


def is_python(source: str) -> bool:
    """Return whether the source is a file with Python code."""
    return source.endswith(".py") and os.path.isfile(source)


def docstring_commands(code: str) -> list[str]:
    """Return the commands in the docstring of a Python program, one per line."""
    try:
        text = ast.get_docstring(ast.parse(code)) or ""
    except SyntaxError:
        text = ""
    return COMMAND_LINE.findall(re.sub(r"\\\n\s*", " ", text))


def without_line_numbers(text: str) -> str:
    """Return the text of a listing without line numbers, if a page shows one before each line.

    The first line may have none.
    """
    lines = text.strip().splitlines()
    matches = [NUMBERED.match(line) for line in lines]
    numbers = [int(match[1]) if match else 1 for match in matches]
    if len(lines) < 2 or numbers != [*range(1, len(lines) + 1)]:
        return text
    pairs = zip(lines, matches, strict=True)
    return "\n".join(line[match.end() if match else 0 :] for line, match in pairs)


def is_page(text: str) -> bool:
    """Return whether a text without a training has sentences outside of comments, as a page has."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    return not text.startswith("#!") and len(SENTENCE.findall("\n".join(lines))) >= 3


def unset_variables(script: str, environment: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Return variables that are never set: names that can stay `$NAME`, and names that cannot.

    A variable that a script tests or computes with does not stay `$NAME`. API keys and access
    tokens stay variables although they are set.
    """
    code = re.sub(r"(?m)^\s*#.*", "", script)
    references, others = list[str](), list[str]()
    for name in sorted({match[1] for match in REFERENCE.finditer(code)} - BASH_VARIABLES):
        is_set = rf"\b{name}\+?=|\b(for|local|declare|getopts \S+|read|mapfile)\b[^\n;]*\b{name}\b"
        has_default = rf"\$\{{{name}:?[-+=?]"
        is_tested = rf"-[nvz] +\W*{name}\b|\(\([^)\n]*\b{name}\b"
        if name in environment:
            references += [name] if SECRET.search(name) else []
        elif not re.search(f"{is_set}|{has_default}", code):
            (others if re.search(is_tested, code) else references).append(name)
    return references, others


BASH = shutil.which("bash") or "/bin/bash"
DEADLINE_S = 20.0
LIMITS = Sandbox(memory_gib=1.0, cpu_s=20.0, file_gib=1.0, max_processes=64, network=False)
MAX_LINKS = 200
"""Folders with at most this many entries become folders of links."""
LOGS = (".log", ".out", ".err")
MAX_OUTPUT = 2**16
"""Bytes of the script's output that are stored."""
MAX_RECORD = 2**20
"""Bytes of a command's record that are read."""
MAX_COMMANDS = 1000
"""Commands of a script that are read."""
TOOLS = """
awk basename bash bc cat comm cut date dirname egrep env expand expr false find fold getopt grep
head hostname id join jq ls mkdir mktemp nl nproc nvidia-smi od paste printf pwd readlink realpath
rev sed seq sort stat tail tee test touch tr true uname uniq wc which whoami xargs
""".split()
"""Programs that run as they are."""
PROGRAMS = """
python python3 torchrun deepspeed accelerate trl vllm colossalai pip huggingface-cli hf openrlhf
""".split()
"""Programs that are recorded, even after `exec`, which ignores functions of bash."""
LAUNCHERS = """
apptainer conda docker enroot mpirun ncu nice nohup nsys numactl parallel pdm poetry ray salloc
sbatch setsid singularity srun stdbuf sudo timeout uv
""".split()
"""Programs that start another program, which is run directly."""


@dataclass(frozen=True)
class Script:
    """A script to run, and its folder."""

    words: Sequence[str]
    """Arguments of bash: a script or `-c TEXT NAME`, then the script's arguments."""
    folder: str
    environment: Mapping[str, str]


@dataclass(frozen=True)
class Command:
    """A command that the script ran."""

    words: list[str]
    folder: str = "."
    environment: Mapping[str, str] = field(default_factory=dict)
    """The variables that the script set for it."""


@dataclass(frozen=True)
class Recording:
    """The commands that the script ran, how it ended, and its output."""

    commands: list[Command]
    ending: str
    printed: str
    variables: Sequence[str] = ()
    """Variables that stay `$NAME` in the translation."""
    unset: Sequence[str] = ()
    """Other variables that the script reads and does not set."""
    num_numbered: int = 0
    """Lines of the text, if they began with their numbers."""


def main(pipe: Connection) -> None:
    """Answer one `Script` with a `Recording`, or with the reason why it has no sandbox."""
    script = pipe.recv()
    die_with_parent()
    adopt_orphans()
    try:
        isolate_network()
        pipe.send(run(script))
    except (ConfigError, OSError) as err:
        pipe.send(str(err))


def run(script: Script) -> Recording:
    """Run the script in a scratch folder, and read the recorded commands."""
    scratch = os.path.realpath(tempfile.mkdtemp(prefix="verl_like_recorder_"))
    folder, home, recorder = (Path(scratch, name) for name in ("folder", "home", "recorder"))
    environment = {
        **script.environment,
        **{MARK: "1", "PATH": f"{recorder}/programs:{recorder}/tools", "HOME": str(home)},
        **{"PWD": str(folder), "TMPDIR": scratch, "BASH_ENV": f"{recorder}/recorder.sh"},
        **{"VERL_LIKE_RECORDER": str(recorder), "VERL_LIKE_LAUNCHERS": " ".join(LAUNCHERS)},
    }
    places = {str(folder): script.folder, str(home): script.environment.get("HOME", str(home))}
    no_sandbox, printed = secrets.token_hex(), bytearray()
    ours, theirs = os.pipe()
    null = os.open(os.devnull, os.O_RDWR)
    commands = -1

    def keep(chunk: bytes) -> None:
        printed.extend(chunk[: MAX_OUTPUT - len(printed)])

    def act() -> None:
        try:
            restrict_writes(scratch, os.devnull)
        except ConfigError as err:
            os.write(2, f"{no_sandbox}{err}".encode())
            return
        LIMITS.allow_cpu()
        os.chdir(folder)
        os.execve(BASH, ["bash", *script.words], environment)

    try:
        _link(folder, script.folder)
        home.mkdir()
        _equip(recorder)
        # opened now, because the script may replace the folder
        commands = os.open(recorder / "commands", os.O_RDONLY | os.O_DIRECTORY)
        child = fork_confined(scratch, LIMITS, {0: null, 1: theirs, 2: theirs}, act)
        os.close(theirs)
        ending = watch(child, scratch, LIMITS, {ours: keep}, time.monotonic() + DEADLINE_S)
        output = _with_places(printed.decode("utf-8", "replace"), places)
        if no_sandbox in output:
            raise ConfigError(output.partition(no_sandbox)[2])
        names = sorted(os.listdir(commands))[:MAX_COMMANDS]
        read = [_read(_text_of(name, commands), places, environment) for name in names]
        return Recording([command for command in read if command], str(ending), output)
    finally:
        os.close(ours)
        os.close(null)
        if commands >= 0:
            os.close(commands)
        remove_folder(scratch)


def _link(there: Path, here: str, *, deep: bool = True) -> None:
    """Link everything in a folder except logs, which a script writes.

    Small folders in it become folders of links, so that the script can write there, too.
    """
    there.mkdir()
    for entry in os.scandir(here):
        if deep and entry.is_dir() and not entry.name.startswith(".") and _is_small(entry.path):
            _link(there / entry.name, entry.path, deep=False)
        elif not entry.name.endswith(LOGS):
            (there / entry.name).symlink_to(entry.path)


def _is_small(folder: str) -> bool:
    try:
        with os.scandir(folder) as entries:
            return len(list(itertools.islice(entries, MAX_LINKS + 1))) <= MAX_LINKS
    except PermissionError:
        return False


def _equip(recorder: Path) -> None:
    """Create the programs in the script's PATH, and the file that its bash reads first."""
    for folder in ("tools", "programs", "commands"):
        (recorder / folder).mkdir(parents=True)
    for name in TOOLS:
        path = shutil.which(name)
        if path:
            (recorder / "tools" / name).symlink_to(path)
    stand_ins = dict.fromkeys(PROGRAMS, 'record "${0##*/}" "$@"')
    stand_ins |= dict.fromkeys(LAUNCHERS, 'run_inner "${0##*/}" "$@"')
    for name, line in stand_ins.items():
        (recorder / "programs" / name).write_text(f"#!{BASH}\n{line}\n", encoding="utf-8")
        (recorder / "programs" / name).chmod(0o755)
    (recorder / "tools" / "sh").write_text(f'#!{BASH}\nbash "$@"\n', encoding="utf-8")
    (recorder / "tools" / "sh").chmod(0o755)
    shutil.copy(Path(__file__).with_suffix(".sh"), recorder / "recorder.sh")


def _read(text: str, places: Mapping[str, str], environment: Mapping[str, str]) -> Command | None:
    """Read a record of `recorder.sh`: folder, words and variables, separated by NULs.

    Return None if the record is incomplete, because the script was stopped, or is not a regular
    file.
    """
    text = _with_places(text, places)
    folder, _, rest = text.partition("\0")
    count, _, rest = rest.partition("\0")
    parts = rest.split("\0")
    if not count.isdigit() or len(parts) <= int(count):
        return None
    variables = dict(pair.partition("=")[::2] for pair in parts[int(count) :])
    left_out = {name for name, value in variables.items() if environment.get(name) == value}
    left_out |= {name for name in variables if not name.isidentifier()}
    left_out |= {"_", "HOME", "OLDPWD", "PATH", "PWD", "SHLVL", "TMPDIR"}
    environment = {name: value for name, value in variables.items() if name not in left_out}
    return Command(parts[: int(count)], folder, environment)


def _text_of(name: str, folder: int) -> str:
    """Return the text of a regular file, up to a limit; the script may have replaced the file."""
    try:
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        descriptor = os.open(name, flags, dir_fd=folder)
    except OSError:
        return ""
    with open(descriptor, "rb") as opened:
        is_regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        return opened.read(MAX_RECORD).decode("utf-8", "replace") if is_regular else ""


def _with_places(text: str, places: Mapping[str, str]) -> str:
    """Replace folders in the scratch folder by the user's folders."""
    for there, here in places.items():
        text = text.replace(there, here.rstrip("/"))
    return text
