"""Tests that send signals end where the shell ignores them, as under nohup, in a background job, and in some CI."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from kit import HEEDED, heed_signals

TESTS = Path(__file__).parents[1]
SENT = (
    "server/test_kv_client.py::test_ctrl_c_ends_the_wait",
    "repository/test_signals.py::test_a_process_that_a_test_begins_ends_by_its_signal",
)


def _ignore() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def test_a_process_that_a_test_begins_ends_by_its_signal():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    child.terminate()
    assert child.wait(60) == -signal.SIGTERM


def test_ignored_signals_are_heeded_and_others_keep_their_handlers():
    before = {number: signal.signal(number, signal.SIG_IGN) for number in HEEDED}
    try:
        heed_signals()
        assert {number: signal.getsignal(number) for number in HEEDED} == HEEDED
        signal.signal(signal.SIGTERM, lambda *_: None)
        heed_signals()
        assert signal.getsignal(signal.SIGTERM) is not HEEDED[signal.SIGTERM]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.slow
def test_tests_that_send_signals_end_where_these_are_ignored():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-x"]
    done = subprocess.run(
        [*command, *SENT],
        cwd=TESTS,
        preexec_fn=_ignore,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(SENT)} passed" in done.stdout
