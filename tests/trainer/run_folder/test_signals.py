"""Signals that ask a run to stop."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from trainer.run_folder.signals import RunInterrupted, StopSignals


def test_the_first_signal_is_recorded_and_the_second_raises() -> None:
    with StopSignals() as stop, stop.deferred():
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.received == signal.SIGUSR1
        with pytest.raises(RunInterrupted, match="SIGINT at once"):
            signal.raise_signal(signal.SIGINT)


def test_the_first_signal_raises_outside_of_steps() -> None:
    with StopSignals(), pytest.raises(RunInterrupted, match="SIGTERM at once") as stopped:
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.exit_code == 143


def test_a_third_signal_has_its_original_handler() -> None:
    before = signal.default_int_handler
    outside = signal.signal(signal.SIGINT, before)  # a background job ignores SIGINT
    with StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) != before
        with pytest.raises(RunInterrupted):
            signal.raise_signal(signal.SIGUSR1)
        with pytest.raises(KeyboardInterrupt) as interrupt:
            signal.raise_signal(signal.SIGINT)
        assert interrupt.type is KeyboardInterrupt
        assert signal.getsignal(signal.SIGINT) == before
    signal.signal(signal.SIGINT, outside)


def test_a_signal_repeated_at_once_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with StopSignals() as stop, stop.deferred():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr("trainer.run_folder.signals.REPEATED_SIGNAL_S", 0.0)
        with pytest.raises(RunInterrupted, match="SIGTERM at once"):
            signal.raise_signal(signal.SIGTERM)


def test_a_handler_installed_later_stays() -> None:
    before = signal.getsignal(signal.SIGTERM)
    try:
        with StopSignals():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_under_nohup_ignores_sighup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop, stop.deferred():
            signal.raise_signal(signal.SIGHUP)
            assert not stop.received
    finally:
        signal.signal(signal.SIGHUP, before)


def test_no_handler_is_installed_outside_the_main_thread() -> None:
    before = signal.getsignal(signal.SIGTERM)
    handlers = []

    def run() -> None:
        with StopSignals() as stop, stop.deferred():
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert handlers == [before]
