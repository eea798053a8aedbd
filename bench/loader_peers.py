"""Other loaders, one a process: load the file onto the GPU a few times, say how long each call took and what came.

python -m bench.loader_peers NAME FILE CALLS
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from bench.loader_model import checksum

Tensors = dict[str, torch.Tensor]


def load_file(path: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(path, device="cuda")


def from_pretrained(path: Path) -> Tensors:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, device_map="cuda")
    return dict(model.state_dict())


def fastsafetensors(path: Path) -> Tensors:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cuda:0", nogds=True, disable_cache=False)
    loader.add_filenames({0: [str(path)]})
    buffer = loader.copy_files_to_device()
    tensors = {name: buffer.get_tensor(name) for name in loader.get_keys()}
    _alive[:] = [loader, buffer]
    return tensors


def instanttensor(path: Path) -> Tensors:
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device="cuda:0") as file:
        return dict(file.tensors())


def instanttensor_no_copy(path: Path) -> Tensors:
    """Into parameters that are there already, as a serving engine has them."""
    from instanttensor import safe_open

    with safe_open(str(path), framework="pt", device="cuda:0", copy=False) as file:
        for name, tensor in file.tensors():
            if name not in _parameters:
                _parameters[name] = torch.empty_like(tensor)
            _parameters[name].copy_(tensor)
    return _parameters


def runai(path: Path) -> Tensors:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(path))
        return {name: tensor.to("cuda") for name, tensor in streamer.get_tensors()}


PEERS: dict[str, tuple[Callable[[Path], Tensors], int]] = {
    "safetensors load_file": (load_file, 3),
    "InstantTensor": (instanttensor, 4),
    "InstantTensor, copy=False": (instanttensor_no_copy, 4),
    "fastsafetensors": (fastsafetensors, 4),
    "Run:ai model streamer": (runai, 3),
    "transformers from_pretrained": (from_pretrained, 2),
}
"""Loaders, and how often each is called: slow ones less often."""

_alive: list[Any] = []
_parameters: Tensors = {}


def main() -> None:
    name, path = sys.argv[1], Path(sys.argv[2])
    load, calls = PEERS[name]
    torch.zeros(1, device="cuda")
    seconds = []
    digest = ""
    for call in range(calls):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        with contextlib.redirect_stdout(sys.stderr):
            tensors = load(path)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
        if call == calls - 1:
            digest = checksum(tensors)
        del tensors
        for thing in reversed(_alive):
            thing.close()
        _alive.clear()
        gc.collect()
        if load is not instanttensor_no_copy:
            torch.cuda.empty_cache()
    print(json.dumps({"seconds": seconds, "checksum": digest}))


if __name__ == "__main__":
    main()
