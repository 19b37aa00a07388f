"""A data-parallel job of TRL's SFTTrainer, started by torchrun: ``trl_ranks.py FOLDER stock|folds``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from trl_jobs import EXACT, JOBS, load_model

if __name__ == "__main__":
    folder, how = Path(sys.argv[1]), sys.argv[2]
    logs = JOBS["SFT"].run(load_model(folder, folds=how == "folds"), folder, settings=EXACT | {"ddp_backend": "gloo"})
    if dist.get_rank() == 0:
        (folder / f"{how}.json").write_text(json.dumps(logs))
    dist.destroy_process_group()
