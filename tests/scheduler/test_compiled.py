"""A compiled build decides what the sources decide, and each reads what the other has written."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench.compiled import build, environment, has_compiler
from scheduler.journal import KEPT, files
from tests.scheduler.test_journal import Journaled, decisions

FULL = 20_000
"""Bytes of a journal's file: the run fills several, and all but the first begin with a snapshot."""

COMPILED = f"""
import sys
from pathlib import Path
from scheduler.core import core
from scheduler.journal import files
from tests.scheduler.test_journal import Journaled, decisions

assert core.__file__.endswith(".so"), core.__file__
given, whole, parts = map(Path, sys.argv[1:])
print(sum(decided.same for file in files(given) for decided in decisions(file)))
Journaled(whole).run()
Journaled(parts, most_bytes={FULL}).run()
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not has_compiler():
        pytest.skip("there is no C compiler")
    directory = tmp_path_factory.mktemp("compiled")
    build(directory)
    return directory


def test_a_compiled_build_decides_the_same_and_reads_what_the_other_wrote(compiled: Path, tmp_path: Path) -> None:
    given, whole, parts, same = (tmp_path / name for name in ("given", "whole", "parts", "same"))
    Journaled(given, most_bytes=FULL).run()
    assert len(files(given)) == KEPT + 1
    command = [sys.executable, "-P", "-c", COMPILED, str(given), str(whole), str(parts)]
    done = subprocess.run(command, env=environment(compiled), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) == sum(len(decisions(file)) for file in files(given))
    Journaled(same).run()
    assert whole.read_text() == same.read_text()
    assert len(files(parts)) == KEPT + 1
    assert all(decided.same for file in files(parts) for decided in decisions(file))
