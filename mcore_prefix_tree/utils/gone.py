"""Settings, commands and options of earlier versions, with the way out; an entry stays for one release."""

from __future__ import annotations

import re

GONE = {
    "batch.calibration": "plans balance ranks by FLOPs; remove the key",
    "calibrate": "plans balance ranks by FLOPs, without measurements",
    "--calibration": "plans balance ranks by FLOPs; remove the option",
    "verify --megatron-lm-path": "verify RECIPE compares folded with unfolded on your installation",
    "partition_kl": "take mode=alm, which also compares the tokens of chunks, or mode=gold",
    "objective.options.scaling": "give kd_weight and ce_weight",
    "objective.options.teachers": "teachers are added with teacher_weights",
    "objective.options.score_sharpness": "teachers are added with teacher_weights",
    "--sparse": "projections are written as matrices; sparse .pt files are still read",
    "bench attention": "measure on a GPU with scripts/gpu_check of the repository",
}


def explain_gone(text: str) -> str | None:
    """Return ``NAME is gone: WAY OUT`` for the first removed name in a text, None if there is none."""
    for name, way_out in GONE.items():
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])", text):
            return f"{name} is gone: {way_out}"
    return None
