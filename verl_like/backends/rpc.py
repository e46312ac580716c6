"""Requests from a driver to a worker process over one connection, and their answers.

    requests = Requests(connection, describe_exit)     # in the driver
    stacks = requests.ask("stacks").result()           # any thread may ask

    RequestServer(connection, host).run(in_turn)       # in the process, in its own thread

Each request of `URGENT_REQUESTS` is answered in its own thread while the process computes. If one
end dies, the connection breaks, and the other end notices. A process that the driver did not start
itself waits in `listen` for a driver that connects with the process's key (`connect`). `main` is
the program of the local backend's child processes.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import pickle
import queue
import secrets
import signal
import socket
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_futures
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import torch

from verl_like.calls.deadlines import Deadlines
from verl_like.calls.diagnose import stack_by_signal
from verl_like.calls.messages import Call, Pending
from verl_like.calls.transport import AnswerPart, Transport
from verl_like.errors import WorkerDiedError, WorkerError, pickling_message
from verl_like.process.host import WorkerHost
from verl_like.process.info import ProcessInfo
from verl_like.process.machine import process_state

logger = logging.getLogger(__name__)
URGENT_REQUESTS = ("stacks", "concurrent", "kill")
KEY_TIMEOUT_S = 5.0
"""Seconds in which a new connection must send the key."""
KEY_BYTES = 16
STOPPED_S = 15.0
"""A process that has been stopped (SIGSTOP) for this many seconds counts as lost."""
Load = Callable[[], Any]
"""Unpickles the content of a message; it is called where an error can be sent as the answer."""


def send(
    connection: Connection, lock: threading.Lock, number: int, method: str, content: Any
) -> None:
    """Send one message: number and method, the pickled content, then its out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    body = cloudpickle.dumps(content, protocol=5, buffer_callback=buffers.append)
    views = [buffer.raw() for buffer in buffers]
    with lock:
        connection.send((number, method, body, [view.nbytes for view in views]))
        for view in views:
            if view.nbytes:
                connection.send_bytes(view)


def receive(connection: Connection) -> tuple[int, str, Load]:
    """Receive one message of `send`, or raise EOFError if the other end is gone."""
    number, method, body, sizes = connection.recv()
    buffers = []
    for size in sizes:
        buffer = bytearray(size)
        if size:
            connection.recv_bytes_into(buffer)
        buffers.append(buffer)
    return number, method, lambda: pickle.loads(body, buffers=buffers)


class Requests:
    """The driver's end of a connection, with the requests that are not answered yet."""

    def __init__(self, connection: Connection, describe_exit: Callable[[], str]) -> None:
        """`describe_exit` explains the end of the process after its connection has closed."""
        self.dead: WorkerDiedError | None = None
        self._connection, self._describe_exit = connection, describe_exit
        self._lock, self._sending = threading.Lock(), threading.Lock()
        self._numbers = itertools.count()
        self._unanswered: dict[int, Future[Any]] = {}
        threading.Thread(target=self._receive, name="answers", daemon=True).start()

    def ask(self, method: str, *args: Any) -> Future[Any]:
        """Send a request of `URGENT_REQUESTS`, and return the future of its answer."""
        number, answer = self.expect()
        if self._sending.locked():  # a large message is being sent, maybe to a stopped process
            work = number, method, args
            threading.Thread(target=self.send, args=work, daemon=True).start()
        else:
            self.send(number, method, args)
        return answer

    def expect(self) -> tuple[int, Future[Any]]:
        """Return the number of a request that is about to be sent, and the future of its answer."""
        answer = Future[Any]()
        with self._lock:
            number = next(self._numbers)
            self._unanswered[number] = answer
        if self.dead is not None:
            self._fail_all(self.dead)
        return number, answer

    def send(self, number: int, method: str, args: Sequence[Any]) -> None:
        """Send a request; if its arguments cannot be sent, the answer is that error."""
        try:
            send(self._connection, self._sending, number, method, args)
        except OSError:
            return  # `_receive` finds the reason
        except Exception as error:  # noqa: BLE001 - it belongs to this request
            summary = f"the arguments cannot be sent to the worker process: {type(error).__name__}"
            self.set_answer(number, WorkerError(f"{summary}: {error}"))

    def set_answer(self, number: int, value: Any) -> None:
        """Set the answer of a request, or its error."""
        with self._lock:
            answer = self._unanswered.pop(number, None)
        if answer is not None and isinstance(value, WorkerError):
            answer.set_exception(value)
        elif answer is not None:
            answer.set_result(value)

    def _receive(self) -> None:
        try:
            while True:
                number, kind, load = receive(self._connection)
                try:
                    content = load()
                except Exception as error:  # noqa: BLE001 - classes may raise anything when unpickled
                    summary = "the driver cannot read the answer of the worker process"
                    kind, content = "error", f"{summary}: {type(error).__name__}: {error}"
                self.set_answer(number, WorkerError(content) if kind == "error" else content)
        except (EOFError, OSError):
            self.dead = WorkerDiedError(self._describe_exit())
            self._fail_all(self.dead)

    def _fail_all(self, error: WorkerDiedError) -> None:
        with self._lock:
            unanswered, self._unanswered = list(self._unanswered.values()), {}
        for answer in unanswered:
            answer.set_exception(error)


class RequestServer:
    """The process's end of a connection, which passes requests to the host."""

    def __init__(self, connection: Connection, host: WorkerHost | None = None) -> None:
        """Without `host`, the first request is `host`, with the arguments of a `WorkerHost`."""
        self._connection, self._host = connection, host
        self._sending = threading.Lock()
        self._at_once: queue.SimpleQueue[tuple[int, str, Load]] = queue.SimpleQueue()
        self._num_idle = threading.Semaphore(0)
        """Counts idle threads, which are reused: starting one takes longer than most answers."""

    def run(self, in_turn: Callable[[tuple[int, str, Load]], None]) -> None:
        """Serve until the driver is gone; requests that are not urgent go to `in_turn`."""
        with contextlib.suppress(EOFError, OSError):
            while True:
                request = receive(self._connection)
                if request[1] not in URGENT_REQUESTS:
                    in_turn(request)
                    continue
                self._at_once.put(request)
                if not self._num_idle.acquire(blocking=False):
                    threading.Thread(target=self._answer_all, name="request", daemon=True).start()

    def _answer_all(self) -> None:
        while True:
            self.answer(*self._at_once.get())
            self._num_idle.release()

    def answer(self, number: int, method: str, load: Load) -> None:
        """Answer a request, unless the driver is gone."""
        with contextlib.suppress(OSError):
            try:
                self._send(number, "answer", self._run(method, load()))
            except WorkerError as error:
                self._send(number, "error", str(error))
            except (SystemExit, OSError):  # raised by a call in its turn: the process ends
                raise
            except BaseException as error:  # noqa: BLE001 - the process edge: the driver gets a text
                text = traceback.format_exception_only(error)[-1].strip()
                self._send(number, "error", pickling_message(text))

    def _run(self, method: str, arguments: Sequence[Any]) -> Any:
        if method == "host":
            self._host = WorkerHost(*arguments)
            torch.set_num_threads(self._host.process_info.threads)
            return None
        if method == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        return getattr(self._host, "call" if method == "concurrent" else method)(*arguments)

    def _send(self, number: int, kind: str, content: Any) -> None:
        send(self._connection, self._sending, number, kind, content)


def main(connection: Connection) -> None:
    """Serve the driver that started this process.

    A reader thread takes requests off the pipe: urgent ones are answered at once, others go to the
    main thread's queue. When the driver is gone the pipe closes and the process ends, even in the
    middle of a call. The signals of a scheduler are ignored: it may send them to all processes of a
    job, and the driver ends its workers after it has saved.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    calls: queue.Queue[tuple[int, str, Load]] = queue.Queue()
    answering = RequestServer(connection)

    def read() -> None:
        answering.run(calls.put)
        os._exit(0)

    threading.Thread(target=read, name="pipe", daemon=True).start()
    while True:
        answering.answer(*calls.get())


# ------------------------------------------------ a process that the driver has not started itself


@dataclass(frozen=True)
class Endpoint:
    """The address where a process waits for its driver, and the key of the connection."""

    address: str
    port: int
    key: bytes


def listen(address: str, host: WorkerHost) -> Endpoint:
    """Wait at this address for a driver that has the key, and answer its requests."""
    listening = socket.create_server((address, 0))
    endpoint = Endpoint(address, listening.getsockname()[1], secrets.token_bytes(KEY_BYTES))
    work = listening, endpoint.key, host
    threading.Thread(target=_accept, args=work, name="pipe", daemon=True).start()
    return endpoint


def connect(endpoint: Endpoint, describe_exit: Callable[[], str]) -> Requests:
    """Connect to an endpoint and return the driver's end, or raise `WorkerDiedError`."""
    try:
        connected = socket.create_connection((endpoint.address, endpoint.port), KEY_TIMEOUT_S)
        connected.sendall(endpoint.key)
    except OSError as error:
        raise WorkerDiedError(f"{describe_exit()} ({error})") from None
    return Requests(_connection_over(connected), describe_exit)


def _accept(listening: socket.socket, key: bytes, host: WorkerHost) -> None:
    """Accept connections until one of them has sent the key."""
    with contextlib.suppress(OSError):  # `_let_in` has shut the socket down
        while True:
            work = listening.accept()[0], listening, key, host
            threading.Thread(target=_let_in, args=work, name="pipe", daemon=True).start()


def _let_in(
    connected: socket.socket, listening: socket.socket, key: bytes, host: WorkerHost
) -> None:
    """Serve a connection that sends the key, and then accept no other one."""
    connected.settimeout(KEY_TIMEOUT_S)
    sent = b""
    with contextlib.suppress(OSError):
        while len(sent) < len(key) and (chunk := connected.recv(len(key) - len(sent))):
            sent += chunk
    if not secrets.compare_digest(sent, key):
        connected.close()
        logger.warning("rejected a connection that did not send the key of this process")
        return
    with contextlib.suppress(OSError):  # another connection has shut it down before
        listening.shutdown(socket.SHUT_RDWR)
    listening.close()
    RequestServer(_connection_over(connected), host).run(_reject)


def _reject(request: tuple[int, str, Load]) -> None:
    raise AssertionError(
        f"unexpected request {request[1]!r}; expected one of "
        f"{', '.join(map(repr, URGENT_REQUESTS))}"
    )


def _connection_over(connected: socket.socket) -> Connection:
    connected.settimeout(None)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return Connection(connected.detach())


# ------------------------------------------------------------------------------------ the transport


class ProcessTransport(Transport):
    """A transport to worker processes, each with a connection for `URGENT_REQUESTS`."""

    can_kill = True

    def __init__(self, processes: Sequence[ProcessInfo], deadlines: Deadlines) -> None:
        """A subclass starts the processes, and makes the connections."""
        super().__init__(processes, deadlines)
        self._stopped_since: dict[int, float] = {}
        """Rank -> the time when `lost` first saw that its process was stopped."""
        self.requests: Sequence[Requests] = ()
        """The connections by rank, after the processes have started."""

    def call_concurrently(self, rank: int, call: Call) -> Pending:
        """Submit a call that waits neither for its turn nor for the results of other calls."""
        answer = self.requests[rank].ask("concurrent", call, ())
        return Pending(rank, AnswerPart(answer, 0), AnswerPart(answer, 1), call.role)

    def stacks(self, seconds: float) -> dict[int, str]:
        """Ask every process, even while it computes; signal a silent process on this machine."""
        answers = [requests.ask("stacks") for requests in self.requests]
        wait_futures(answers, seconds)
        stacks = {}
        for rank, process in enumerate(self.processes):
            if rank < len(answers) and answers[rank].done():
                if answers[rank].exception() is None:  # its process has not ended
                    stacks[rank] = answers[rank].result()
                continue
            path, pid = process.log_path(), self.pid_here(rank)
            if path is not None and pid is not None:
                text = stack_by_signal(pid, path)
                if text:
                    stacks[rank] = text
        return stacks

    @abstractmethod
    def pid_here(self, rank: int) -> int | None:
        """Return the process id of a rank, or None if it is on another machine."""

    def lost(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the ranks whose connection is closed or whose process is stopped, and why."""
        lost, now = {}, time.monotonic()
        for rank in ranks:
            pid = self.pid_here(rank)
            dead = self.requests[rank].dead if rank < len(self.requests) else None
            if dead:
                lost[rank] = str(dead)
            elif pid is None or process_state(pid) != "T":
                self._stopped_since.pop(rank, None)
            elif now - self._stopped_since.setdefault(rank, now) >= STOPPED_S:
                lost[rank] = (
                    f"the process has been stopped for {STOPPED_S:.0f} s (SIGSTOP, by a user or "
                    f"by a scheduler). Continue it with `kill -CONT {pid}`."
                )
        return lost

    def kill(self, rank: int) -> None:
        """Ask the process to kill itself, and wait at most 5 s until its connection breaks."""
        wait_futures([self.requests[rank].ask("kill")], KEY_TIMEOUT_S)
