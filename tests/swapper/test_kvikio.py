"""The kvikio reader: its real code path, on a host without a GPU, over a driver that the test compiles.

kvikio loads the driver once a process, so each case runs in a process of its own.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

STUB = Path(__file__).parent / "cuda_stub.c"
ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(importlib.util.find_spec("kvikio") is None, reason="kvikio is not installed")

PRELUDE = """
from pathlib import Path
import sys
from swapper.errors import ReadError
from swapper.host_frames import HostFramePool
from swapper.kvikio_reader import KvikioReader
from swapper.pager import Pager
from tests.swapper.paging import *
path = Path(sys.argv[1])
reader = KvikioReader(threads=2, device="cpu", waiters=2)
"""

PAGE_IN = """
shard = write_shard(path, [1, 2, 1, 3], tail=8192)
pool = HostFramePool(4, PAGE)
pager = Pager(pool, reader, verify=True)
paged = pager.open("model", shard, path)
result = page_in(pager, "model", 0, 4)
assert resident_bytes(paged) == data_of([1, 2, 1, 3], tail=8192)
assert {source: bytes.pages for source, bytes in result.sources.items()} == {"posix": 3, "alias": 1}, result
pager.shutdown()
reader.close()
assert pool.free == 4
print("paged in")
"""

SHORT_FILE = """
path.write_bytes(bytes(5000))
pool = HostFramePool(1, PAGE)
region = pool.reserve(PAGE)
pool.map(region, 0, pool.take())
file = reader.open(path)
error = file.read(4096, region.address, 8192).exception(timeout=PATIENCE)
assert isinstance(error, ReadError), error
assert f"{path} cannot be read at offset 4096" in str(error) and "EOF" in str(error), error
file.close()
print("refused")
"""

MISSING_FILE = """
try:
    reader.open(path)
except ReadError as error:
    assert str(path) in str(error)
    print("refused")
"""

NO_DRIVER = """
from swapper.errors import ConfigError
from swapper.kvikio_reader import KvikioReader
try:
    KvikioReader()
except ConfigError as error:
    print(error)
"""

NOT_INSTALLED = "import sys\nsys.modules['kvikio'] = None\n" + NO_DRIVER


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the stand-in driver."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    directory = tmp_path_factory.mktemp("driver")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", directory / "libcuda.so.1", STUB], check=True, timeout=60)
    return directory


def run(program: str, path: Path, driver: Path | None) -> str:
    """What a program prints. Its end must be a good one."""
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    environment["PYTHONPATH"] = str(ROOT)
    if driver is not None:
        environment["LD_LIBRARY_PATH"] = str(driver)
    ended = subprocess.run(
        [sys.executable, "-c", program, str(path)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_shard_is_paged_in_byte_for_byte(driver: Path, tmp_path: Path) -> None:
    assert run(PRELUDE + PAGE_IN, tmp_path / "shard", driver) == "paged in"


def test_a_short_read_is_an_error_that_names_file_and_offset(driver: Path, tmp_path: Path) -> None:
    assert run(PRELUDE + SHORT_FILE, tmp_path / "short", driver) == "refused"


def test_a_missing_file_is_a_read_error(driver: Path, tmp_path: Path) -> None:
    assert run(PRELUDE + MISSING_FILE, tmp_path / "missing", driver) == "refused"


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this host has the driver")
def test_without_the_driver_it_is_refused_with_the_cure(tmp_path: Path) -> None:
    message = run(NO_DRIVER, tmp_path, None)
    assert "libcuda.so.1" in message
    assert "pread" in message


def test_without_kvikio_it_is_refused_with_the_cure(tmp_path: Path) -> None:
    assert "pip install 'gswapd[gpu]'" in run(NOT_INSTALLED, tmp_path, None)
