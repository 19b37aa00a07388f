"""Calls that the recipes' launchers would start: programs in place of torchrun and srun record them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "recipes" / "launch"
RECIPES = sorted((ROOT / "recipes").glob("*.sh"))

# ``ANSWER_<program>`` is a program's output, ``EFFECT_<program>`` a Python statement that it runs. ``python -c``
# looks for Apex, which ``NO_APEX`` hides.
_RECORDER = f"""#!{sys.executable}
import json, os, sys
name = os.path.basename(sys.argv[0])
if sys.argv[1] == "-c":
    sys.exit("NO_APEX" in os.environ)
with open(os.environ["RECORD"], "a") as record:
    record.write(json.dumps({{"program": name, "words": sys.argv[1:], "environment": dict(os.environ)}}) + "\\n")
print(os.environ.get("ANSWER_" + name, ""))
exec(os.environ.get("EFFECT_" + name, ""))
"""
# Sizes that a dry run finds in the data.
DECIDED = "sizes that the data decides: "
SIZES = ("--micro-batch-size", "128", "--seq-length", "868")
_PROGRAMS = ("torchrun", "python", "srun", "scontrol")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A program that was started."""

    program: str
    words: list[str]
    environment: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Launch:
    """A launcher that is over."""

    status: int
    error: str
    calls: list[Call]

    @property
    def call(self) -> Call:
        """The only program, or the job behind a dry run that finds its sizes."""
        *dry_runs, last = self.calls
        assert [call.words[-1] for call in dry_runs] in ([], ["--prefix-tree-dry-run"])
        return last


def launch(folder: Path, launcher: str, *arguments: object, cwd: Path = ROOT, **variables: object) -> Launch:
    """Run ``recipes/launch/LAUNCHER`` with only these variables set."""
    programs, record = folder / "bin", folder / "record.jsonl"
    programs.mkdir(exist_ok=True)
    for program in _PROGRAMS:
        (programs / program).write_text(_RECORDER)
        (programs / program).chmod(0o755)
    record.write_text("")
    environment = {"PATH": f"{programs}:/usr/bin:/bin", "HOME": os.environ.get("HOME", "/"), "RECORD": str(record)}
    environment["ANSWER_python"] = f"loading\n{DECIDED}{' '.join(SIZES)}\n283 samples an epoch"
    done = subprocess.run(
        ["bash", str(LAUNCH / launcher), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=60,
        env=environment | {name: str(value) for name, value in variables.items()},
    )
    calls = [Call(**json.loads(line)) for line in record.read_text().splitlines()]
    return Launch(status=done.returncode, error=done.stderr, calls=calls)


def slurm(folder: Path, recipe: Path, *arguments: object, nodes: int, **variables: object) -> Launch:
    """As Slurm runs the batch script, on the first of ``nodes`` nodes."""
    return launch(
        folder,
        "slurm.sbatch",
        recipe,
        *arguments,
        cwd=folder,
        **{
            "SLURM_SUBMIT_DIR": ROOT,
            "SLURM_JOB_ID": 1234567,
            "SLURM_JOB_NUM_NODES": nodes,
            "SLURM_JOB_NODELIST": f"gpu[01-{nodes:02d}]",
            "ANSWER_scontrol": "\n".join(f"gpu{number:02d}" for number in range(1, nodes + 1)),
            **variables,
        },
    )
