"""Processes that run code of users, in sandboxes, and the messages between them and their driver.

    pool = Pool()
    process = pool.start(code)                            # `code` is a `UserCode`
    facts = pool.wait_until_loaded(process)               # or a ConfigError
    pool.send(process, {7: "a message"}, reply_s=10.0)
    for process, key, answer in pool.answers(seconds):    # key 7, or a Failure, which ends it
        ...
    pool.end(process)                                     # and all processes that it has started

    def main(control):                                    # in the process
        spec, folder, withheld = control.recv()
        supervise(control.fileno(), folder, spec.sandbox, lambda data: serve(UserEnd(data), spec))

Messages are pickled, because our own code writes them. Answers come from untrusted code, so they
are lines of JSON, `[number of the message, answer]`. A line with the number of no message that
waits is ignored: a fork of the user's code has sent it, or an earlier message. Nothing here imports
torch.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import pickle
import secrets
import selectors
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Any, TypeVar

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.machine import IS_LINUX
from verl_like.process.sandbox import KILL_S, MARK, remove_folder, visible_environment

logger = logging.getLogger(__name__)
T = TypeVar("T")
LONGEST_ANSWER = 2**24
"""Maximum bytes of an answer."""
ENDED_S = 0.5
"""Seconds until the end of a fork is a failure; by then it is known if all forks have ended."""
LOADED, FAILED = -1, -2
"""Keys of the answer with facts about the loaded code, and of a `ProcessFailure`."""
END_S = 10.0
"""Seconds that a supervisor has to kill its processes."""
_LENGTH = struct.Struct("!Q")


@dataclass(frozen=True)
class UserCode:
    """What a process loads: `spec`, which has a `sandbox`, by the module `program`."""

    program: str
    spec: Any
    name: str
    """The code, for error messages, such as "the reward function f.py:score"."""
    read_facts: Callable[[Any], Any]
    """Checks what the loaded code says about itself."""
    load_s: float
    """Time limit for loading."""
    if_slow: str
    """What to do if the code loads too slowly."""


@dataclass(frozen=True)
class ProcessFailure:
    """The last answer of a process. `words` say what it did, such as "ended with exit code 1"."""

    words: str
    is_late: bool = False


class Supervised:
    """A supervisor and its processes, as the process that starts them sees them.

    Untrusted code runs as the supervisor's user: it can pause or kill the supervisor and outlive
    it. But the environment variable `MARK` of all its processes has a value of its own.
    """

    def __init__(self, program: str, env: Sequence[str] = ()) -> None:
        """Start the supervisor, which runs `program` and sees these environment variables."""
        self._mark = secrets.token_hex(16)
        self.visible = visible_environment(env) | {MARK: self._mark}
        """The environment variables of its processes."""
        self.folder = tempfile.mkdtemp(prefix="verl_like_sandbox_")
        """The working folder of its child."""
        try:
            self._process, self.pipe = start_child(program, inherited=self.visible)
        except BaseException:
            remove_folder(self.folder)
            raise

    def stop(self) -> None:
        """End its processes and remove the folder; the other end of the pipe must be closed."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGCONT)
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # a killed supervisor leaves its processes running
            self._kill_marked()
            remove_folder(self.folder)

    def _kill_marked(self) -> None:
        from verl_like.process.family import processes_with  # only the end needs it

        end, mark = time.monotonic() + KILL_S, f"{MARK}={self._mark}".encode()
        while time.monotonic() < end:
            marked = processes_with(mark)
            if not marked:
                return
            for pid in marked:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.002)


@dataclass(eq=False)
class Process:
    """A process, the messages that it has not answered, and what is not sent or not read."""

    socket: socket.socket
    code: UserCode | None = None
    supervised: Supervised | None = None
    """Its supervisor; None for a fork of another process."""
    waiting: dict[int, int] = field(default_factory=dict)
    """By number of a message: the caller's key."""
    num_sent: int = 0
    """Number of its messages, including the first one, on which it loads its code."""
    num_requests: int = 0
    reply_s: float = inf
    end: float = inf
    until: float = inf
    """Until when the next answer must arrive."""
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))
    received: bytes = b""
    has_ended: bool = False


class ProcessPool:
    """Sends messages to processes, and receives their answers until a deadline."""

    def __init__(self) -> None:
        self.processes: set[Process] = set()
        self._selector = selectors.DefaultSelector()
        self._events: deque[tuple[Process, int, Any]] = deque()
        self.close = weakref.finalize(self, _close, self.processes, self._selector)
        """Ends all processes."""

    def start(self, code: UserCode) -> Process:
        """Start a process that loads the code. Its first answer has the key `LOADED`."""
        if not IS_LINUX:
            _say_what_limits_are_missing()
        try:
            supervised = Supervised(code.program, code.spec.sandbox.env)
        except OSError as err:
            raise ConfigError(f"{code.name} could not be loaded: {err}") from err
        connection = socket.socket(fileno=os.dup(supervised.pipe.fileno()))
        with supervised.pipe as pipe, suppress(OSError):  # its supervisor says why it has ended
            withheld = sorted(os.environ.keys() - supervised.visible.keys())
            pipe.send((code.spec, supervised.folder, withheld))
        process = Process(connection, code, supervised, {0: LOADED}, num_sent=1)
        process.until = time.monotonic() + code.load_s
        return self.add(process)

    def add(self, process: Process) -> Process:
        """Receive the answers of this process, too."""
        self.processes.add(process)
        self._selector.register(process.socket, selectors.EVENT_READ, process)
        return process

    def wait_until_loaded(self, process: Process) -> Any:
        """Return the facts about the code of a process that was just started."""
        while True:
            for other, _, answer in self.answers(inf):
                if other is process and isinstance(answer, ProcessFailure):
                    raise ConfigError(answer.words)
                if other is process:
                    return answer

    def send(
        self, process: Process, messages: Mapping[int, Any], reply_s: float, end: float = inf
    ) -> None:
        """Send messages by the caller's keys. Each answer may take `reply_s`, but not beyond `end`.

        `end` is a time of `time.monotonic`. The process reads messages while this one goes on.
        """
        if not process.waiting:
            process.until = min(end, time.monotonic() + reply_s)
        process.reply_s, process.end = reply_s, end
        process.num_requests += 1
        process.waiting.update(enumerate(messages, process.num_sent))
        content = pack_messages([*enumerate(messages.values(), process.num_sent)])
        process.num_sent += len(messages)
        process.unsent = memoryview(b"".join((process.unsent, content)))
        self._write(process)

    def answers(self, seconds: float) -> Iterator[tuple[Process, int, Any]]:
        """Yield the answers that arrive within `seconds`, with their processes and keys.

        Yield immediately if no process has a message.
        """
        if not self._events:
            until = min((process.until for process in self.processes), default=inf)
            wait = min(seconds, until - time.monotonic()) if until < inf else 0.0
            for key, ready in self._selector.select(max(0.0, wait)):
                process = key.data
                if ready & selectors.EVENT_READ:
                    self._read(process)
                else:
                    self._write(process)
            now = time.monotonic()
            for process in [process for process in self.processes if now >= process.until]:
                is_late = bool(process.waiting) and not process.has_ended
                self._fail(process, "did not answer" if is_late else "has ended", is_late)
        while self._events:
            yield self._events.popleft()

    def end(self, process: Process) -> None:
        """End a process and all that it has started, and forget its answers."""
        self._events = deque(event for event in self._events if event[0] is not process)
        if process not in self.processes:
            return
        self.processes.remove(process)
        if not process.has_ended:
            self._selector.unregister(process.socket)
        _end(process)

    def _write(self, process: Process) -> None:
        """Send what fits into the socket now; the rest when it has been read."""
        try:
            sent = process.socket.send(process.unsent, socket.MSG_DONTWAIT)
        except BlockingIOError:
            sent = 0
        except OSError:  # it has ended, which reading shows
            sent = len(process.unsent)
        process.unsent = process.unsent[sent:] or memoryview(b"")
        if not process.has_ended:
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if process.unsent else 0)
            if self._selector.get_key(process.socket).events != events:
                self._selector.modify(process.socket, events, process)

    def _read(self, process: Process) -> None:
        """Read lines; note if the process has ended."""
        try:
            chunk = process.socket.recv(2**18, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk and process.supervised is not None:
            self._fail(process, "and its supervisor are gone")
        elif not chunk:
            self._selector.unregister(process.socket)
            process.has_ended, process.until = True, time.monotonic() + ENDED_S
        *lines, process.received = (process.received + chunk).split(b"\n")
        for line in lines:
            if line and process in self.processes:
                self._handle_line(process, line)
        if len(process.received) > LONGEST_ANSWER:
            self._fail(process, f"sent an answer of more than {LONGEST_ANSWER // 2**20} MiB")

    def _handle_line(self, process: Process, line: bytes) -> None:
        """Add the event of a line."""
        try:
            answer = json.loads(line)
        except (ValueError, RecursionError):
            self._fail(process, f"sent an invalid reply: {line!r:.80}")
            return
        if isinstance(answer, dict) and "ended" in answer and process.supervised is not None:
            self._fail(process, f"{answer['ended']!s:.1000}")
            return
        try:
            number, answer = answer
            key = process.waiting.pop(number)
        except (TypeError, ValueError, KeyError):
            return
        process.until = inf
        if process.waiting:
            process.until = min(process.end, time.monotonic() + process.reply_s)
        if key == LOADED and process.code is not None:
            try:
                problem, facts = answer
                answer = process.code.read_facts(facts) if problem is None else None
            except (TypeError, ValueError) as err:
                problem = f"{process.code.name} sent an unexpected reply: {err}"
            if problem is not None:
                self._fail(process, str(problem))
                return
        self._events.append((process, key, answer))

    def _fail(self, process: Process, words: str, is_late: bool = False) -> None:
        """End a process; its `ProcessFailure` follows the answers that have arrived."""
        code, arrived = process.code, [event for event in self._events if event[0] is process]
        if code is not None and LOADED in process.waiting.values():
            words = f"{code.name} could not be loaded: its process {words}. Its output is above."
            if is_late:
                words = f"{code.name} did not load within {code.load_s:g} s. {code.if_slow}"
        self.end(process)
        self._events.extend((*arrived, (process, FAILED, ProcessFailure(words, is_late))))


@functools.cache
def _say_what_limits_are_missing() -> None:
    """Say once that code of users runs without most limits of a sandbox."""
    logger.warning(
        "this system (%s) has no sandbox: rewards and environments run in plain processes, with "
        "limits of CPU time and of the size of files.",
        sys.platform,
    )


def _end(process: Process) -> None:
    process.socket.close()  # its supervisor then kills it
    if process.supervised is not None:
        process.supervised.stop()


def _close(processes: set[Process], selector: selectors.BaseSelector) -> None:
    selector.close()
    while processes:
        _end(processes.pop())


def pack_messages(messages: Sequence[tuple[int, Any]]) -> bytes:
    """Return the bytes of messages with their numbers."""
    content = pickle.dumps(messages)
    return _LENGTH.pack(len(content)) + content


class UserEnd:
    """The end of a process that runs code of users."""

    def __init__(self, descriptor: int) -> None:
        """Take over a socket."""
        self._socket, self._pid = socket.socket(fileno=descriptor), os.getpid()
        self._incoming, self._sending = self._socket.makefile("rb"), threading.Lock()

    def load(
        self, name: str, load: Callable[[], tuple[T, Any]], describe: Callable[[BaseException], str]
    ) -> T:
        """Load code, and send facts about it; or send why it cannot be loaded, and exit."""
        try:
            code, facts = load()
        except ConfigError as err:
            problem = str(err)
        except BaseException as err:  # noqa: BLE001 - a user's file may raise anything
            traceback.print_exc()
            problem = f"{name} could not be loaded: {describe(err)}"
        else:
            self.send(0, [None, facts])
            return code
        self.send(0, [problem, None])
        sys.exit()

    def receive(self) -> list[tuple[int, Any]]:
        """Return the next messages with their numbers; raise EOFError if the driver closed."""
        (length,) = _LENGTH.unpack(self._read(_LENGTH.size))
        messages: list[tuple[int, Any]] = pickle.loads(self._read(length))
        return messages

    def send(self, number: int, answer: Any) -> None:
        """Answer a message."""
        if os.getpid() != self._pid:  # a fork that the code made and that went on
            os._exit(0)
        line = json.dumps([number, answer]).encode() + b"\n"
        with self._sending:
            self._socket.sendall(line)

    def close(self) -> None:
        """Close the socket."""
        self._incoming.close()
        self._socket.close()

    def _read(self, count: int) -> bytes:
        try:
            content = self._incoming.read(count)
        except ConnectionResetError:  # the driver was killed
            content = b""
        if len(content) < count:
            raise EOFError
        return content


def describe_error(
    err: BaseException, withheld: Collection[str] = (), sandbox: str = "reward.sandbox"
) -> str:
    """Describe an error in the user's code; name the sandbox key that may have caused it.

    `withheld` are names of environment variables that only the driver has.
    """
    if isinstance(err, SystemExit):
        return f"SystemExit: it called sys.exit({'' if err.code is None else repr(err.code)})"
    words = f"{type(err).__name__}: {_text(err)}"
    if isinstance(err, KeyError) and err.args and err.args[0] in withheld:
        words += f" (a variable that it does not get: set {sandbox}.env=[{err.args[0]}])"
    if isinstance(err, MemoryError):
        words += f" (its limit is {sandbox}.memory_gib)"
    return words[:2000]


def _text(err: BaseException) -> str:
    try:
        return str(err)
    except Exception:  # noqa: BLE001 - its message may fail, too
        return "(its message cannot be read)"
