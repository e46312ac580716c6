"""One reward process, from the driver's side: started when it is needed, killed when it hangs.

    process = RewardProcess(function, start_deadline)
    process.start()                                     # a ConfigError if the function is refused
    for found in process.outcomes({3: sample}, end): ...    # number -> outcome
    process.stop()                                      # nothing of it is left

`workers.rewards.process` is the program that it runs.
"""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from threading import Lock
from typing import Any

from verl_like.errors import ConfigError
from verl_like.process.child import start_child
from verl_like.process.sandbox import visible_environment
from verl_like.process.watched import Watched
from verl_like.registry import check_file
from workers.rewards.call import Sample
from workers.rewards.channel import BUFFER_BYTES, DONE, DriverEnd, NoAnswerError
from workers.rewards.outcome import Outcome, read_answer
from workers.rewards.process import FunctionSpec

GRACE_S = 0.5
"""What a sample gets beyond its deadline, which coroutines keep themselves, before the kill."""
BLOCKED_SHARE = 1.25
"""Deadlines in which a process says which of its coroutines blocks the others."""
END_S = 10.0
"""Time that a supervisor gets to kill what it watches."""
LONGEST_ENDING = 2**16
"""Bytes in which a supervisor says how a process ended."""


class ProcessEndedError(Exception):
    """A reward process has ended, or what it says is no answer; the message says how."""


class RewardProcess:
    """A process that scores samples by a function, with its supervisor."""

    def __init__(self, function: FunctionSpec, start_deadline: float):
        """Starts nothing; a file that is not there is refused."""
        if function.path.endswith(".py"):  # the process works in a folder of its own
            check_file(Path(function.path), f"{function.path_key}={function.path}")
            function = replace(function, path=str(Path(function.path).absolute()))
        self._function, self._start_deadline = function, start_deadline
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._control: Connection | None = None
        self._channel: DriverEnd | None = None
        self._watched: Watched | None = None
        self._closing = Lock()
        """Held where the socket to the supervisor is closed, which another thread may end."""
        self.takes_all = False
        """Whether it gets all that waits: calls run at the same time, or one takes a whole batch.

        Known when the function is loaded.
        """
        self.answers_together = False
        """Whether one call scores a whole batch."""
        self._reads: frozenset[str] | None = None
        """What its calls read of a sample, if that is not all: more is not sent."""

    def start(self) -> DriverEnd:
        """The socket to the process, which is started if there is none."""
        if self._channel is None:
            try:
                self._channel = self._started()
                self._meet(self._channel)
            except BaseException:
                self.stop()
                raise
        return self._channel

    def _started(self) -> DriverEnd:
        """Start the supervisor, and give it the function and its end of a socket."""
        visible = visible_environment(self._function.sandbox.env)
        self._supervisor, self._control = start_child("workers.rewards.process", inherited=visible)
        ours, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile() as buffer:
            try:
                buffer.truncate(BUFFER_BYTES)
                self._control.send((self._function, sorted(os.environ.keys() - visible.keys())))
                for handle in (theirs.fileno(), buffer.fileno()):
                    send_handle(self._control, handle, self._supervisor.pid)
                return DriverEnd(ours, os.dup(buffer.fileno()))
            except BaseException:
                ours.close()
                raise

    def _meet(self, channel: DriverEnd) -> None:
        """Wait until the function is loaded; what is wrong with it is a ConfigError."""
        try:
            met = channel.receive(time.monotonic() + self._start_deadline)
            problem, side_by_side, together, reads = met
            self._reads = None if reads is None else frozenset(map(str, reads))
            if problem is None:  # or else it has ended
                self._watched = self._what_is_watched()
        except TimeoutError as err:
            raise ConfigError(
                f"The reward function {self._function} is not loaded within "
                f"{self._start_deadline:g} s."
            ) from err
        except (NoAnswerError, OSError, EOFError, TypeError, ValueError) as err:
            raise ProcessEndedError(self._how_it_ended(err)) from err
        if problem is not None:
            raise ConfigError(str(problem))
        self.answers_together = bool(together)
        self.takes_all = self.answers_together or bool(side_by_side)

    def _what_is_watched(self) -> Watched:
        """As the supervisor has told before its child had loaded the function."""
        assert self._control is not None, "it has been started"
        if not self._control.poll(END_S):
            raise EOFError
        return Watched(*json.loads(self._control.recv_bytes(LONGEST_ENDING)))

    def outcomes(
        self, asked: Mapping[int, Sample], end: float, until: float = math.inf
    ) -> Iterator[dict[int, Outcome | None]]:
        """Numbers and outcomes of these samples, when all are done or something is wrong.

        They come as they are found, mostly all at once. If it takes them one by one, it begins with
        none after `until`; those have no outcome, and the last of them comes first. A TimeoutError
        at a sample's deadline or at `end`, a ProcessEndedError if there will be no more: then the
        process is to be stopped. Times are those of `time.monotonic`.
        """
        channel = self.start()
        missing = dict(asked)
        try:
            samples = [(number, self._part_of(sample)) for number, sample in asked.items()]
            channel.send((samples, until), min(end, time.monotonic() + self._patience()))
            is_done, look_at = False, min(end, until)
            while not is_done:
                said, failure = self._next_line(channel, look_at)
                is_done = said == DONE
                over_socket = () if failure or is_done else (said,)
                found, wrong = _read_answers(chain(channel.buffered(), over_socket), missing)
                if found:
                    yield found
                if wrong is not None:
                    raise wrong

                if time.monotonic() >= until:
                    begun = 0 if is_done else 1  # no more than the first that is missing
                    later = list(missing)[begun:]
                    for number in later:
                        del missing[number]
                    if later:
                        yield dict.fromkeys(reversed(later))
                    look_at = end
                if failure is not None and not self._may_go_on(failure, channel, end):
                    raise failure
            if missing:
                raise NoAnswerError(f"has not answered for sample {min(missing)}")
        except TimeoutError:
            raise
        except (NoAnswerError, OSError, EOFError, ValueError) as err:
            raise ProcessEndedError(self._how_it_ended(err)) from err

    def _part_of(self, sample: Sample) -> Sample:
        """What is sent of it."""
        if self._reads is None or sample.keys() <= self._reads:
            return sample
        return {name: value for name, value in sample.items() if name in self._reads}

    def _next_line(self, channel: DriverEnd, deadline: float) -> tuple[Any, Exception | None]:
        """What the process says next, or why it says nothing."""
        try:
            latest = channel.last_answer + self._patience()
            return channel.receive(min(deadline, latest)), None
        except (NoAnswerError, OSError, EOFError) as err:
            return None, err

    def _may_go_on(self, failure: Exception, channel: DriverEnd, end: float) -> bool:
        """Whether it has only been silent, for no longer than it may."""
        latest = min(end, channel.last_answer + self._patience())
        return isinstance(failure, TimeoutError) and time.monotonic() < latest

    def _patience(self) -> float:
        """Seconds in which the next answer has to come."""
        if self.answers_together:
            return float("inf")
        shares = BLOCKED_SHARE if self.takes_all else 1.0
        return shares * self._function.deadline + GRACE_S

    def _how_it_ended(self, err: Exception) -> str:
        """What its supervisor says; or that it lives, and what it sent is no answer."""
        if isinstance(err, NoAnswerError | ValueError) and not isinstance(err, OSError):
            return f"the reward process {err}"
        assert self._control is not None, "it has been started"
        try:
            while self._control.poll(END_S):
                words = json.loads(self._control.recv_bytes(LONGEST_ENDING))
                if isinstance(words, str):
                    return f"the reward process {words}"
        except (OSError, EOFError, ValueError):
            pass
        return "the reward process and its supervisor are gone"

    def give_up(self) -> None:
        """Kill the process, from another thread than that which asks it: there it has ended."""
        with self._closing, suppress(OSError):
            if self._control is not None:
                with socket.socket(fileno=os.dup(self._control.fileno())) as control:
                    control.shutdown(socket.SHUT_WR)  # its supervisor sees it

    def stop(self) -> None:
        """End the process and all that it has started, if there is one."""
        if self._channel is not None:
            self._channel.close()
        with self._closing:
            if self._control is not None:
                self._control.close()  # its supervisor sees it
        if self._supervisor is not None:
            try:
                self._supervisor.wait(END_S)
            except subprocess.TimeoutExpired:
                self._supervisor.kill()
                self._supervisor.wait()
        if self._watched is not None:
            if self._supervisor is not None and self._supervisor.returncode != 0:
                self._watched.end()  # a supervisor that is killed leaves it alone
            self._watched.close()
        self._channel = self._control = self._supervisor = self._watched = None


def _read_answers(
    answers: Iterable[Any], missing: dict[int, Sample]
) -> tuple[dict[int, Outcome | None], Exception | None]:
    """Number -> outcome of these answers, no longer `missing`, up to one that is none; and why."""
    found: dict[int, Outcome | None] = {}
    try:
        for answer in answers:
            number, outcome = read_answer(answer, missing)
            del missing[number]
            found[number] = outcome
    except (NoAnswerError, ValueError) as err:
        return found, err
    return found, None
