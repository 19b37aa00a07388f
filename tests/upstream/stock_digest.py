"""Prints the results of stock models, to the bit: the same on a patched megatron-core as on the released one.

Run by test_patched_core.py with either on the path, and the folders of its imports.
"""

from __future__ import annotations

import hashlib
import warnings

warnings.simplefilter("ignore")

import torch  # noqa: E402
from harness.seam_models import build, local_spec, tiny_config  # noqa: E402
from harness.seam_runs import VARIANTS, unfolded  # noqa: E402

from mcore_prefix_tree.cpu.emulation import cpu_emulation, single_process  # noqa: E402

torch.set_num_threads(1)


def digest(name: str) -> str:
    """Hash the loss, the log-probabilities and all gradients of a model of the seam's tests."""
    settings, model_settings = VARIANTS[name]
    config = tiny_config(**settings)
    outcome = unfolded(build(config, local_spec(config), **model_settings), entropy_weight=0.1)
    found = hashlib.sha256()
    for tensor in (outcome["loss"], *outcome["logprob"], *outcome["grads"].values()):
        assert tensor is not None
        found.update(tensor.numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    with cpu_emulation(force=True), single_process():
        for name in ("rope", "yarn", "GPT-2", "no positions", "full recompute", "selective recompute", "heterogeneous"):
            print(name, digest(name))
