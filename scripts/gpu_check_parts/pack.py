"""``--pack DIR``: the folders that travel to a machine without a network, each within what may travel.

``DIR/steps`` has the wheels that training steps need beside torch, ``DIR/fa4`` has FlashAttention-4 as one archive: its
wheels are larger than all that may travel, and compressed together they are not. The two do not fit in one journey.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gpu_check_parts.context import ROOT

# Of the checkout and the folder together.
LARGEST_BYTES = 64 << 20
PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
# Found by nothing at run time, and large.
LEFT_OUT = ("cu13/lib/stubs",)
FOLDERS = ("steps", "fa4")


def pins_of(name: str) -> Path:
    """Return the file of the exact versions that a folder holds."""
    return ROOT / f"requirements-pack-{name}.txt"


def pack(folder: Path) -> int:
    """Make both folders and print how to use them; returns the exit code."""
    tree = tree_bytes()
    code = 0
    print("compressing fa4 takes some minutes", flush=True)
    for name in FOLDERS:
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for old in (*target.glob("*.whl"), *target.glob("*.tar.xz")):
            old.unlink()
        with tempfile.TemporaryDirectory() as unpacked:
            if name == "fa4":
                download(pins_of(name), Path(unpacked, "wheels"))
                archive(sorted(Path(unpacked, "wheels").glob("*.whl")), Path(unpacked, "site"), target / "fa4.tar.xz")
            else:
                download(pins_of(name), target)
        (target / "pins.txt").write_text(pins_of(name).read_text())
        size = sum(file.stat().st_size for file in target.iterdir())
        verdict = "fits" if size + tree <= LARGEST_BYTES else "is TOO LARGE"
        code |= size + tree > LARGEST_BYTES
        print(f"{target}: {size / 2**20:.1f} MiB; with the checkout's {tree / 2**20:.1f} MiB it {verdict} in 64 MiB")
    print("there: scripts/gpu_check --minutes 9 --wheels FOLDER, once with each; between the two copy the result into")
    print("benchmarks/results, so that the second goes on from it")
    return code


def tree_bytes() -> int:
    """Return the size of the files that git tracks."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def download(pins: Path, target: Path) -> None:
    """Fetch wheels of exact versions, without what they depend on: the machine has the rest."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--python-version", PYTHON, "--implementation", "cp"]
    command += [word for platform in PLATFORMS for word in ("--platform", platform)]
    subprocess.run([*command, "--dest", str(target), "-r", str(pins)], check=True)


def archive(wheels: list[Path], site: Path, target: Path) -> None:
    """Unpack wheels into a folder, and compress it as one."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(site)
    excluded = [f"--exclude={name}" for name in LEFT_OUT]
    xz = "xz --x86 --lzma2=preset=6,dict=192MiB"
    subprocess.run(
        ["tar", *excluded, "--use-compress-program", xz, "-cf", str(target), "-C", str(site), "."], check=True
    )
