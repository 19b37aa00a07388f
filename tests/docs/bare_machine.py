"""A machine with a torch and little else, as an environment: with the same packages missing."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import zipfile
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from requirement_pins import packed_pins

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
# In addition to the packages of requirements/pack-*.txt.
ABSENT = ("mcore-prefix-tree", "megatron-bridge", "liger-kernel", "wandb")
TOOL = """#!/bin/sh
# Stands for {name}: runs the program behind its options, and prints the lines that its readers look for.
while [ "$#" -gt 0 ]; do
    case $1 in
    */python*) break ;;
    esac
    shift
done
"$@" || exit $?
{prints}
"""
TOOLS = {
    "compute-sanitizer": "echo '========= ERROR SUMMARY: 0 errors'",
    "ncu": """printf '"ID","Metric Name","Metric Unit","Metric Value"\\n"0","Duration","us","7.1"\\n'""",
}


def make(folder: Path) -> Path:
    """Make the environment, with a fake GPU and NVIDIA's tools; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    absent = {_normal(name) for name in (*ABSENT, *packed_pins("steps"), *packed_pins("fa4"))} - {"typing_extensions"}
    modules = {module for module, names in packages_distributions().items() if {_normal(one) for one in names} & absent}
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        stem = _normal(path.name.partition("-")[0].removesuffix(".py"))
        if path.name not in modules and stem not in absent and not path.name.startswith(("__editable__", "_editable")):
            (packages / path.name).symlink_to(path)
    (packages / "fake_gpu.py").symlink_to(HERE / "fake_gpu.py")
    (packages / "fake_gpu.pth").write_text("import fake_gpu\n")
    for name, prints in TOOLS.items():
        tool = folder / "bin" / name
        tool.write_text(TOOL.format(name=name, prints=prints))
        tool.chmod(0o755)
    return folder / "bin" / "python"


def wheels(folder: Path) -> None:
    """Pack the installed packages of ``requirements/pack-steps.txt`` into wheels again."""
    folder.mkdir()
    for name in packed_pins("steps"):
        found = distribution(name)
        target = folder / f"{_normal(name)}-{found.version}-py3-none-any.whl"
        with zipfile.ZipFile(target, "w") as packed:
            for file in found.files or ():
                if ".." not in file.parts and "__pycache__" not in file.parts:
                    packed.write(found.locate_file(file), str(file))


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()
