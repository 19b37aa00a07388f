"""Import the modules that the documentation uses after each extra of pyproject.toml; scripts/extras calls it.

python scripts/lib/extras.py                        # in the environment of this Python
python scripts/lib/extras.py --newest [EXTRA ...]   # each extra in an empty environment, from the package index
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Imports after each extra; tests/docs/test_extras.py compares the keys with pyproject.toml, and the packages with all
# imports of the package, the examples and the pages.
IMPORTS = {
    "arrow": ("pyarrow.feather", "pyarrow.ipc", "pyarrow.parquet", "mcore_prefix_tree.data.tables"),
    "bridge": ("accelerate", "megatron.bridge", "mcore_prefix_tree.mcore.models.bridge"),
    "docs": ("mkdocs.__main__", "material", "mkdocstrings_handlers.python"),
    "gpu": ("cutlass", "flash_attn.cute.interface", "triton"),
    "hf": ("transformers", "mcore_prefix_tree.data.huggingface", "mcore_prefix_tree.integrations.transformers"),
    "hub": ("datasets", "pyarrow.ipc", "mcore_prefix_tree.data.files"),
    "plot": ("matplotlib.pyplot", "mcore_prefix_tree.cli.pictures"),
    "te": ("transformer_engine.pytorch",),
    "tensorboard": ("torch.utils.tensorboard", "mcore_prefix_tree.mcore.loop.logs"),
    "wandb": ("wandb", "mcore_prefix_tree.mcore.loop.logs"),
}
# Packages that docs/huggingface.md installs after an extra, with --no-deps.
AFTERWARDS = {"bridge": "megatron-bridge"}
# Extras that need a newer Python than requires-python, and the reason.
NEEDS_PYTHON = {"bridge": ((3, 12), "Megatron-Bridge"), "docs": ((3, 11), "the site")}
# These need a GPU's driver or a separate environment; scripts/test installs all other pins.
ELSEWHERE = {"gpu": "requirements/gpu.txt", "hub": "requirements/peers.txt"}
# These are compiled against a torch for CUDA (docs/gpu.md), so they are imported only if they are installed.
COMPILED = ("te",)
# Importing it needs TransformerEngine, which is built with CUDA; without it, the tests' stand-in is used.
IMPORT_BRIDGE = f"""
from importlib.util import find_spec
if find_spec("transformer_engine"):
    from megatron.bridge import AutoBridge
else:
    import sys
    sys.path += [{str(ROOT / "tests")!r}, {str(ROOT / "tests" / "peers")!r}]
    import bridge_models
    bridge_models.auto_bridge()
"""


def pin_of(package: str) -> str:
    """Return the release that requirements/bridge.txt pins and the page names."""
    (found,) = re.findall(rf"^({package}==[\w.]+)", (ROOT / "requirements/bridge.txt").read_text(), re.M)
    return str(found)


def skipped_on(extra: str, python: tuple[int, int]) -> str | None:
    """Return why this Python cannot install an extra, or None."""
    if extra in COMPILED and find_spec(IMPORTS[extra][0].partition(".")[0]) is None:
        return "it must be compiled against a torch for CUDA; see docs/gpu.md"
    wanted, what = NEEDS_PYTHON.get(extra, ((0, 0), ""))
    return f"{what} needs Python {wanted[0]}.{wanted[1]}" if python < wanted else None


def import_all(python: str, extra: str, folder: str, environment: dict[str, str]) -> str | None:
    """Import the extra's modules in a process; returns the error's last line, or None."""
    # Megatron-Bridge logs a traceback for every optional package that is missing.
    lines = ["import logging", "logging.disable(logging.INFO)"]
    lines += [IMPORT_BRIDGE if name == "megatron.bridge" else f"import {name}" for name in IMPORTS[extra]]
    command = [python, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no message"])[-1]


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def check_installed() -> int:
    """Check the environment of this Python: the extras' bounds against the installed versions, then the imports."""
    from packaging.requirements import Requirement

    failed = 0
    declared = [Requirement(text) for text in requires("mcore-prefix-tree") or ()]
    for extra in IMPORTS:
        wanted = [one for one in declared if one.marker and one.marker.evaluate({"extra": extra})]
        missing = [one.name for one in wanted if installed(one.name) is None]
        why = skipped_on(extra, sys.version_info[:2])
        if why is None and missing and extra in ELSEWHERE:
            why = f"{ELSEWHERE[extra]} pins {', '.join(missing)}"
        if why is not None:
            print(f"{extra}: skipped, {why}", flush=True)
            continue
        outside = [one for one in wanted if not one.specifier.contains(installed(one.name) or "0", prereleases=True)]
        if missing:
            problem: str | None = f"{', '.join(missing)} missing"
        elif outside:
            problem = f"wants {outside[0]}, and {installed(outside[0].name)} is installed"
        else:
            problem = import_all(sys.executable, extra, str(ROOT), dict(os.environ))
        failed |= tell(extra, problem, ", ".join(f"{one.name} {installed(one.name)}" for one in wanted))
    return failed


def install_newest(extra: str) -> int:
    """Install an extra from the package index into an empty environment, and import."""
    why = skipped_on(extra, sys.version_info[:2])
    if why is not None:
        print(f"{extra}: skipped, {why}", flush=True)
        return 0
    # Only packages that pip installs can be imported, not this checkout.
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    with tempfile.TemporaryDirectory(prefix=f"extra-{extra}-") as folder:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        python = str(Path(folder, "bin", "python"))
        # Most modules of torch are never imported here, and compiling all of them takes longer than unpacking them.
        pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"]
        commands = [[*pip, f"{ROOT}[{extra}]"]]
        if extra in AFTERWARDS:
            commands.append([*pip, "--no-deps", pin_of(AFTERWARDS[extra])])
        for command in commands:
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                return tell(extra, done.stderr.strip()[-2000:], "")
        problem = import_all(python, extra, folder, environment)
        freeze = [python, "-m", "pip", "--disable-pip-version-check", "freeze"]
        frozen = subprocess.run(freeze, env=environment, capture_output=True, text=True, check=True).stdout
    shown = re.findall(r"^((?:torch|megatron-\w+|transformers|pyarrow|datasets|wandb|matplotlib)==\S+)$", frozen, re.M)
    return tell(extra, problem, " ".join(shown))


def tell(extra: str, problem: str | None, packages: str) -> int:
    print(f"{extra}: FAILED: {problem}" if problem else f"{extra}: imported, with {packages}", flush=True)
    return int(problem is not None)


def main(arguments: list[str]) -> int:
    if not arguments:
        return check_installed()
    unknown = [extra for extra in arguments[1:] if extra not in IMPORTS]
    if arguments[0] != "--newest" or unknown:
        print(f"use --newest, then none or some of {', '.join(IMPORTS)}", file=sys.stderr)
        return 2
    return max(install_newest(extra) for extra in arguments[1:] or IMPORTS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
