"""Prints, in MiB, memory for loading a Hugging Face folder in addition to the model, and the folder's largest file."""

import json
import sys
import threading
import time
from pathlib import Path

import torch
from bridge_models import auto_bridge

from mcore_prefix_tree.cpu.emulation import single_process
from mcore_prefix_tree.mcore.models.bridge import load_bridge, load_folder, make_provider
from mcore_prefix_tree.mcore.models.bridge_weights import check_weights
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks
from mcore_prefix_tree.settings import ModelConfig, ParallelConfig
from mcore_prefix_tree.settings.hf_folder import HuggingFaceFolder

MIB = 2**20


def own_memory() -> float:
    """Return this process's memory, without the pages of files, which the kernel can drop."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    raise AssertionError("Linux writes it down")


def main(folder: str) -> None:
    auto_bridge()
    with single_process():
        model = ModelConfig(hf=folder, **HuggingFaceFolder.read(folder).sizes)
        provider = make_provider(model, ParallelConfig(), on_gpu=False)
        assert model.vocab_size is not None
        chunks = build_chunks(model, provider, vocab_size=model.vocab_size, device=torch.device("cpu"))
        for parameter in chunks[0].parameters():
            parameter.data.fill_(0)  # pages that nothing has touched are no memory yet
        # Modules imported on the way are no weights.
        read = HuggingFaceFolder.read(folder)
        check_weights(read, load_bridge(folder).hf_pretrained.config, {*read.files}, set())
        before, seen, done = own_memory(), [0.0], threading.Event()

        def watch() -> None:
            while not done.is_set():
                seen[0] = max(seen[0], own_memory())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        load_folder(folder, chunks)
        done.set()
        watcher.join()
        shard = sum(parameter.nbytes for parameter in chunks[0].parameters()) / MIB
    largest = max(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / MIB
    print(json.dumps({"grew": seen[0] - before, "shard": shard, "file": largest}))


if __name__ == "__main__":
    main(sys.argv[1])
