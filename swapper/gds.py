"""Does this host really read from storage to GPU memory without a stop in between (GPUDirect Storage)?

kvikio may use cuFile although cuFile itself falls back to POSIX reads, in silence. So both are asked: kvikio must not
prefer its compatibility mode, and cuFile must have one of the two ways to do it: the kernel module nvidia-fs, or, by
its configuration, the kernel's own PCI peer-to-peer (docs/storage.md).
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import ModuleType

NVIDIA_FS = Path("/proc/driver/nvidia-fs/version")
CUFILE_CONFIG = Path("/etc/cufile.json")
KERNEL_SYMBOLS = Path("/proc/kallsyms")
P2PDMA_SYMBOL = "p2pdma_pgmap_ops"


def has_gds(kvikio: ModuleType) -> bool:
    """`kvikio` with its modules `defaults` and `cufile_driver` imported."""
    if kvikio.defaults.is_compat_mode_preferred():
        return False
    try:
        if not kvikio.cufile_driver.get("is_gds_available"):
            return False
    except RuntimeError:  # there is no cuFile library, or no driver for it
        return False
    return NVIDIA_FS.exists() or _uses_p2pdma()


def _uses_p2pdma() -> bool:
    path = Path(os.environ.get("CUFILE_ENV_PATH_JSON") or CUFILE_CONFIG)
    try:
        text = path.read_text()
        # The file that NVIDIA ships has comments, which JSON has not.
        settings = json.loads(re.sub(r"^\s*//.*$", "", text, flags=re.MULTILINE))
        wanted = bool(settings.get("properties", {}).get("use_pci_p2pdma"))
        return wanted and P2PDMA_SYMBOL in KERNEL_SYMBOLS.read_text()
    except (OSError, ValueError, AttributeError):
        return False
