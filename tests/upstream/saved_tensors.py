"""Write the full tensors of a Megatron checkpoint to a file of torch's: read by the checkout's own megatron.core."""

from __future__ import annotations

import os
import sys

sys.path.insert(0, os.environ["MEGATRON_LM_PATH"])

import torch
from megatron.core import dist_checkpointing

from mcore_prefix_tree.cpu.emulation import single_process

if __name__ == "__main__":
    source, file = sys.argv[1:]
    with single_process():
        loaded = dist_checkpointing.load_plain_tensors(source)
    torch.save({name: value for name, value in loaded.items() if isinstance(value, torch.Tensor)}, file)
