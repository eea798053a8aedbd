"""A build whose scheduler is compiled, in a directory of its own, so that it is there beside the sources."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MADE_OF = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "scheduler", "swapper")


def has_compiler() -> bool:
    name = (sysconfig.get_config_var("CC") or "cc").split()[0]
    return shutil.which(name) is not None


def build(directory: Path) -> None:
    """About a minute. The wheel is made from a copy, and unpacked: `directory` can be imported from."""
    source, wheels = directory / "source", directory / "wheels"
    source.mkdir(parents=True)
    for name in MADE_OF:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-build-isolation"]
    command += ["--no-deps", "--wheel-dir", str(wheels), str(source)]
    subprocess.run(command, env=os.environ | {"COMPILE_SCHEDULER": "1"}, check=True)
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(directory)
    shutil.rmtree(source)
    shutil.rmtree(wheels)


def environment(directory: Path | None) -> dict[str, str]:
    """For `python -P`: our modules from this build, or from the sources; what the build lacks from the sources too."""
    places = [directory, ROOT] if directory is not None else [ROOT]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, places))}
