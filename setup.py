"""What `pyproject.toml` cannot say: with COMPILE_SCHEDULER=1, the scheduler's core and its simulator are compiled.

    COMPILE_SCHEDULER=1 pip wheel --no-build-isolation --no-deps --wheel-dir DIRECTORY .

mypyc makes C of the same sources, which goes on to decide the same, several times as fast. It needs a C compiler, and
mypy and setuptools where pip runs. Without the variable, as in a development install, the sources run as they are.
"""

import os
from pathlib import Path

from setuptools import setup

ROOMS = ("scheduler/core", "scheduler/policy", "scheduler/simulate")
INTERPRETED = {
    "__init__",
    # The decorator of messages is for the type checker, which mypyc's functions cannot tell it.
    "message",
    # These are for reports and tests, and work on arrays.
    "invariants", "measured", "outcome", "report", "workload",
}  # fmt: skip


def sources() -> list[str]:
    files = [file for room in ROOMS for file in sorted(Path(room).glob("*.py"))]
    compiled = [file for file in files if file.stem not in INTERPRETED or file == Path("scheduler/core/measured.py")]
    return [str(file) for file in compiled]


if os.environ.get("COMPILE_SCHEDULER") == "1":
    from mypyc.build import mypycify

    setup(ext_modules=mypycify(sources(), opt_level="3", debug_level="0"))
else:
    setup()
