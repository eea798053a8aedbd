"""The rate of plain copies from pinned memory to one GPU, beside those that other processes make: a link's limit.

    python -m bench.pinned_copy GPU

Says when it is ready, waits for a line, and prints bytes a second.
"""

from __future__ import annotations

import sys
import time

import torch

NBYTES = 1 << 30
TIMES = 24


def main() -> None:
    device = torch.device("cuda", int(sys.argv[1]))
    source = torch.empty(NBYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(NBYTES, dtype=torch.uint8, device=device)
    target.copy_(source)
    print("ready", flush=True)
    sys.stdin.readline()
    torch.cuda.synchronize(device)
    begun = time.perf_counter()
    for _ in range(TIMES):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize(device)
    print(TIMES * NBYTES / (time.perf_counter() - begun))


if __name__ == "__main__":
    main()
