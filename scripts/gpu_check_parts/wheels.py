"""Make a Python with the packages of a ``--pack`` folder in addition to those of this Python, without an index.

It is a virtual environment, because parts of FlashAttention-4 are found through ``.pth`` files, which work only there.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# Before Python 3.12 a comprehension would not see the name ``site``.
_BORROW = "import site; list(map(site.addsitedir, {folders!r}))\n"


def python_with(folder: Path) -> Path:
    """Return the interpreter of an environment with the wheels and archives of a folder; made once per content."""
    folder = folder.resolve()
    files = sorted([*folder.glob("*.whl"), *folder.glob("*.tar.xz")])
    if not files:
        raise SystemExit(
            f"gpu_check: --wheels {folder} has no *.whl and no *.tar.xz; scripts/gpu_check --pack makes them"
        )
    content = hashlib.sha256(sys.executable.encode())
    for file in files:
        content.update(f"{file.name} {file.stat().st_size} {file.stat().st_mtime_ns}".encode())
    home = Path(tempfile.gettempdir()) / f"gpu_check_{content.hexdigest()[:12]}"
    python = home / "bin" / "python"
    if (home / "complete").exists():
        return python
    shutil.rmtree(home, ignore_errors=True)
    venv.create(home, symlinks=True)
    packages = packages_of(python)
    # After the unpacked packages, which replace older versions.
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (packages / "zz_borrowed.pth").write_text(_BORROW.format(folders=borrowed))
    wheels = [str(file) for file in files if file.suffix == ".whl"]
    if wheels:
        # Installed with the pip of this Python, so the environment needs no pip.
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-index", "--no-deps"]
        _run([*pip, "--no-compile", "--no-cache-dir", "--disable-pip-version-check", "--ignore-installed", *wheels])
    for file in files:
        if file.suffix == ".xz":
            _run(["tar", "-xJf", str(file), "-C", str(packages)])
    (home / "complete").touch()
    return python


def packages_of(python: Path) -> Path:
    """Return the folder that a Python installs into."""
    command = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    return Path(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip())


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"gpu_check: {' '.join(command[:6])} ... failed: {done.stderr.strip()[-1000:]}")
