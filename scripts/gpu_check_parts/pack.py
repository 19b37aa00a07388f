"""``--pack DIR``: make folders for a machine without a network, each within the size limit of one transfer.

``DIR/steps`` has the wheels that training steps need in addition to torch, ``DIR/fa4`` has FlashAttention-4 as one
archive, because its wheels exceed the limit unless they are compressed together. The two do not fit in one transfer.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gpu_check_parts.context import ROOT

# Limit for the checkout and the folder together.
LARGEST_BYTES = 64 << 20
PYTHON = "3.12"
PLATFORMS = (*(f"manylinux_2_{minor}_x86_64" for minor in (39, 35, 34, 31, 28, 27, 24, 17)), "manylinux2014_x86_64")
# Large, and not used at run time.
LEFT_OUT = ("cu13/lib/stubs",)
FOLDERS = ("steps", "fa4")
# Folders of the checkout that no part of the check reads.
UNREAD = ("docs", "examples", "patches")


def pins_of(name: str) -> Path:
    """Return the file of the exact versions that a folder holds."""
    return ROOT / f"requirements/pack-{name}.txt"


def pack(folder: Path) -> int:
    """Make both folders and print the trips; return the exit code."""
    print("compressing fa4 takes some minutes", flush=True)
    sizes = {}
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
        sizes[str(target)] = sum(file.stat().st_size for file in target.iterdir())
    lines, code = trips(sizes, tree=tracked_bytes(), unread=tracked_bytes(*UNREAD))
    print(*lines, sep="\n")
    return code


def trips(sizes: dict[str, int], *, tree: int, unread: int) -> tuple[list[str], int]:
    """Return the contents of each trip, as lines for the user, and the exit code: 1 if a folder does not fit.

    ``sizes`` are the bytes of each folder, ``tree`` of the checkout, and ``unread`` of its folders :data:`UNREAD`.
    """
    limit = f"{LARGEST_BYTES >> 20} MiB"
    lines, code = [], 0
    for folder, size in sizes.items():
        total = size + tree
        lines.append(f"{folder}: {_mib(size)}; with the checkout {_mib(total)} of {limit}")
        if total - unread > LARGEST_BYTES:
            code = 1
            lines.append(
                f"  TOO LARGE by {_mib(total - LARGEST_BYTES)}: pin smaller packages in requirements/pack-*.txt"
            )
        elif total > LARGEST_BYTES:
            lines.append(
                f"  TOO LARGE by {_mib(total - LARGEST_BYTES)}: remove {', '.join(UNREAD)} from the checkout first"
            )
    together = sum(sizes.values()) + tree
    if together <= LARGEST_BYTES:
        lines.append(f"all folders fit in one trip, {_mib(together)}; call the script once with each:")
    else:
        lines.append(f"together they are {_mib(together)}: make one trip for each folder, without the others:")
    lines += [f"  scripts/gpu_check --minutes 9 --wheels {folder}" for folder in sizes]
    lines.append("before the second call copy the result of the first into benchmarks/results, and its rows are kept")
    return lines, code


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def tracked_bytes(*folders: str) -> int:
    """Return the size of the tracked files in all or some folders of the checkout."""
    command = ["git", "ls-files", "-z", "--", *folders]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [ROOT / name for name in done.stdout.split("\0") if name]
    return sum(file.stat().st_size for file in files if file.is_file())


def download(pins: Path, target: Path) -> None:
    """Download wheels of exact versions, without their dependencies, which the machine has."""
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
