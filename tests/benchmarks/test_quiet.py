"""Runs that others disturb are repeated, whatever came out."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import quiet
from quiet import Spent, undisturbed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def burn(seconds: float) -> None:
    end_s = time.process_time() + seconds
    while time.process_time() < end_s:
        pass


def test_what_this_process_and_its_children_take_is_not_others() -> None:
    before = Spent.now()
    code = "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        burn(0.3)
        while Spent.now().own_s - before.own_s < 0.6:
            time.sleep(0.02)
        after = Spent.now()
        child.kill()
    # Also when the child has ended.
    assert Spent.now().own_s >= after.own_s
    assert after.machine_s - before.machine_s >= 0.5


def test_a_disturbed_run_is_repeated_and_a_quiet_one_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    shares = iter([0.5, 0.0, 0.3, 0.0, 0.1])
    monkeypatch.setattr(Spent, "others_since", lambda self, before: next(shares))
    monkeypatch.setattr(quiet, "LOOK_S", 0.0)
    results = iter(["disturbed", "kept"])
    assert undisturbed(lambda: next(results), 0.2, 10.0) == ("kept", 0.1)


def test_a_machine_that_is_never_quiet_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Spent, "others_since", lambda self, before: 0.9)
    monkeypatch.setattr(quiet, "LOOK_S", 0.01)
    with pytest.raises(TimeoutError, match="more than 20 %"):
        undisturbed(lambda: pytest.fail("it must not run"), 0.2, 0.1)
