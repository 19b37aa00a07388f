"""Commands and quotations of pages that no test runs, each with its reason; everything else on a page is run.

An entry names a page and how its commands begin. ``test_page_runs.py`` fails if an entry fits no command.
"""

from __future__ import annotations

INSTALLS = "installs packages from an index; tests/docs/test_requirements.py and CI's first step hold it"
READERS = "has a placeholder, a recipe or a model of the reader's"
GPUS = "needs GPUs"
MACHINES = "needs several machines; tests/torchrun and tests/docs/test_recipes.py start the same with stand-ins"
TOOLS = "starts this project's own tests, benchmarks or site, as CI does"
CHECKOUT = "needs a checkout of Megatron-LM; tests/upstream runs it"
REPEATED = "is the same command as on docs/getting-started.md, which runs it"
TRAINERS = "needs another trainer; tests/peers holds it"
MESSAGES = "is the message about a file that the page does not give; tests/unit hold the messages"
IN_PEERS = "needs a model folder; tests/peers/test_grpo_own_model.py runs the page's commands on a tiny one"

# Page: {how a command begins: why it is not run}; "" fits every command of the page, a whole line only itself.
NOT_RUN: dict[str, dict[str, str]] = {
    "CONTRIBUTING.md": {"": TOOLS},
    "README.md": {"scripts/": INSTALLS, "pip install": INSTALLS, "mcore-prefix-tree train": REPEATED},
    "docs/attention.md": {"scripts/gpu_check": GPUS},
    "docs/correctness.md": {"": TOOLS},
    "docs/getting-started.md": {
        "scripts/quickstart": INSTALLS,
        ". .venv": INSTALLS,
        "pip install": INSTALLS,
        "mcore-prefix-tree train recipes/quickstart.yaml\n": "shows nothing; the page's next train is the same",
        "mcore-prefix-tree recipes mine": "is the way of those without a clone; tests/docs/test_wheel.py runs it",
    },
    "docs/data.md": {
        "mcore-prefix-tree inspect saved/train": "reads a library's folder; tests/peers/test_data_datasets.py has some",
        "mcore-prefix-tree inspect hf://": "downloads from the hub",
    },
    "docs/gpu.md": {"": GPUS},
    "docs/howto/distillation.md": {"mcore-prefix-tree train student.yaml\n": READERS},
    "docs/howto/grpo-own-model.md": {"": IN_PEERS},
    "docs/howto/many-machines.md": {"": MACHINES},
    "docs/howto/token-ids.md": {"mcore-prefix-tree inspect turns.jsonl": READERS},
    "docs/howto/megatron-lm.md": {"": CHECKOUT},
    "docs/huggingface.md": {"": READERS},
    "docs/objectives.md": {"": READERS},
    "docs/performance.md": {"": TOOLS},
    "docs/trainers.md": {"": TRAINERS},
    "docs/verl.md": {"": TRAINERS},
    "docs/xtoken.md": {
        "torchrun": CHECKOUT,
        "mcore-prefix-tree xtoken export-teacher": READERS,
        "mcore-prefix-tree train student.yaml": READERS,
    },
    "patches/README.md": {"": CHECKOUT},
    "recipes/README.md": {"": GPUS},
}

# Page: {how an output block below no command begins: why it cannot be compared}.
QUOTED: dict[str, dict[str, str]] = {
    "docs/data.md": {"error: ": MESSAGES},
    "docs/howto/megatron-lm.md": {"scored.jsonl: ": CHECKOUT, "sizes that": CHECKOUT, "...": CHECKOUT},
    "docs/howto/token-ids.md": {"Samples would share more": "is tested by tests/unit/test_cli_causes.py"},
    "docs/inside.md": {"prefix trees of 100 micro-batches": TRAINERS},
    "docs/trainers.md": {"{'loss': 5.631": TRAINERS},
    "docs/planning.md": {"Training steps fold more": "is tested by tests/unit/test_cli_causes.py"},
    "docs/xtoken.md": {"error: ": MESSAGES},
}

# A page that continues another, whose files it finds.
AFTER = {
    "docs/howto/critic.md": "docs/howto/dpo.md",
    "docs/howto/distillation.md": "docs/howto/sft.md",
    "docs/howto/dpo.md": "docs/howto/sft.md",
    "docs/howto/grpo.md": "docs/howto/sft.md",
    "docs/howto/scoring.md": "docs/howto/sft.md",
}

# Pages that are run with the slow tests: half a minute of CPU or more each, for commands that another test runs too.
LONG = {
    "docs/howto/critic.md": "tests/model/test_train_scalar_heads.py closes PPO's loop: reward model, values, critic",
    "docs/howto/distillation.md": "tests/model/test_score_serves.py scores, and trains on what it wrote",
    "docs/howto/dpo.md": "tests/model/test_score.py writes ref_logprobs, and test_train_objectives.py beside it trains",
    "docs/howto/grpo.md": "tests/peers/test_grpo_own_model.py scores, trains and scores again",
}

# Changes of recipes in the reader's folder: (file, text, replacement). Disabled features take longer than the
# training itself; verify and the closing table have separate tests, and pages cut both from a training's output.
SHORTER = [("recipes/quickstart.yaml", "compare: true", "compare: false\nverify: {enabled: false}")]

# Options with which a command whose output no page shows ends sooner, by how it begins.
SOONER = {"mcore-prefix-tree verify recipes/quickstart.yaml": "batch.global_batch_size=8"}


def reason(page: str, command: str) -> str | None:
    """Return why a command of a page is not run; None if it is."""
    return next((why for start, why in NOT_RUN.get(page, {}).items() if f"{command}\n".startswith(start)), None)
