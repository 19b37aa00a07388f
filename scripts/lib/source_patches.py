"""Apply and revert the series of ``patches/``: all files of a series or none, and byte for byte.

``git apply`` works outside of repositories, finds a hunk whose lines have only moved, and never guesses. It is run on
copies in a temporary folder; its output is written next to the originals and renamed over them. So a file of the
target is always either unchanged or complete.
"""

from __future__ import annotations

import ast
import enum
import importlib.metadata
import os
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

PATCHES = Path(__file__).resolve().parents[2] / "patches"
TITLES = {"megatron-lm": "Megatron-LM", "transformer-engine": "TransformerEngine"}


class PatchError(ValueError):
    """A series cannot be applied to a target or reverted. No file of the target was changed."""


@dataclass(frozen=True)
class Hunk:
    """A hunk of a patch.

    Attributes:
        header: ``@@ -1,2 +3,4 @@ where``.
        lines: lines with their mark: space, plus or minus.
    """

    header: str
    lines: tuple[str, ...]

    def start(self, *, reverse: bool) -> int:
        """Return the expected first line of the hunk, from 1: in the file before the patch, or after it."""
        found = re.match(r"@@ -(\d+)(?:,\d+)? \+(\d+)", self.header)
        assert found is not None
        return int(found[2 if reverse else 1])

    def expected(self, *, reverse: bool) -> list[str]:
        """Return the lines that must exist before the hunk is applied, or reverted."""
        return [line[1:] for line in self.lines if line[:1] in (" ", "+" if reverse else "-")]


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One patch file and its entry in ``manifest.toml``.

    Attributes:
        path: path of the patch file.
        files: files that it changes, relative to the target.
        why: reason for the patch.
        upstream: whether it was sent upstream.
        until: when it can be removed.
    """

    path: Path
    files: tuple[str, ...]
    why: str
    upstream: str
    until: str

    def _section(self, file: str) -> str:
        for section in re.split(r"^diff --git ", self.path.read_text(), flags=re.MULTILINE)[1:]:
            if section.startswith(f"a/{file} "):
                return section
        return ""

    def hunks(self, file: str) -> list[Hunk]:
        """Return a file's hunks, in their order."""
        parts = re.split(r"^(@@ .*)\n", self._section(file), flags=re.MULTILINE)[1:]
        return [Hunk(header, tuple(body.splitlines())) for header, body in zip(parts[::2], parts[1::2], strict=True)]

    def creates(self, file: str) -> bool:
        """Return whether the patch adds a file instead of changing it."""
        return "\nnew file mode " in self._section(file)


@dataclass(frozen=True, kw_only=True)
class Series:
    """The patches for one version of one project, in the order they are applied.

    Attributes:
        project: a key of :data:`TITLES`.
        versions: versions of the project that the series supports; the first is the base's.
        base: the source that it was written for: a tag or a branch, or a release on the package index.
        commit: commit of the tag or branch, 40 hexadecimal digits; for a release the sha256 of its wheel, 64 digits.
        patches: patches of the series.
    """

    project: str
    versions: tuple[str, ...]
    base: str
    commit: str
    patches: tuple[Patch, ...]

    @property
    def title(self) -> str:
        """For people."""
        return f"{TITLES[self.project]} {self.base}"


def read_manifest(folder: Path = PATCHES) -> list[Series]:
    """All series of ``manifest.toml``."""
    manifest = tomllib.loads((folder / "manifest.toml").read_text())
    return [
        Series(
            project=series["project"],
            versions=tuple(series["versions"]),
            base=series["base"],
            commit=series["commit"],
            patches=tuple(
                Patch(
                    path=folder / series["folder"] / patch["file"],
                    files=tuple(patch["files"]),
                    why=patch["why"],
                    upstream=patch["upstream"],
                    until=patch["until"],
                )
                for patch in series["patch"]
            ),
        )
        for series in manifest["series"]
    ]


@dataclass(frozen=True, kw_only=True)
class Target:
    """A folder with the source of a project: a checkout, or the ``site-packages`` that a wheel was unpacked into.

    Attributes:
        project: a key of :data:`TITLES`.
        root: contains ``megatron`` or ``transformer_engine``.
        version: version of the project.
    """

    project: str
    root: Path
    version: str

    @property
    def wheel(self) -> bool:
        """Return whether pip installed the files."""
        found = _distribution(self.root, self.project)
        return found is not None and found.read_text("RECORD") is not None

    @classmethod
    def megatron_lm(cls, root: Path) -> Target:
        """Return the target of Megatron-LM, or of megatron-core without it.

        Raises:
            PatchError: the folder does not contain it.
        """
        info = root / "megatron" / "core" / "package_info.py"
        if not info.is_file():
            raise PatchError(f"{root} has no megatron/core: name the folder that contains megatron")
        numbers = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse(info.read_text()).body
            if isinstance(node, ast.Assign)
            and isinstance(node.targets[0], ast.Name)
            and isinstance(node.value, ast.Constant)
        }
        version = ".".join(str(numbers[part]) for part in ("MAJOR", "MINOR", "PATCH")) + str(numbers["PRE_RELEASE"])
        return cls(project="megatron-lm", root=root, version=version)

    @classmethod
    def transformer_engine(cls, root: Path) -> Target:
        """Return the target of TransformerEngine.

        Raises:
            PatchError: the folder does not contain it.
        """
        if not (root / "transformer_engine" / "pytorch").is_dir():
            raise PatchError(
                f"{root} has no transformer_engine/pytorch: name the folder that contains transformer_engine"
            )
        found = _distribution(root, "transformer-engine")
        if found is not None:
            return cls(project="transformer-engine", root=root, version=found.version)
        checkout = root / "build_tools" / "VERSION.txt"
        if not checkout.is_file():
            raise PatchError(
                f"{root} does not state its version of TransformerEngine: it has neither a "
                "transformer_engine-*.dist-info nor build_tools/VERSION.txt"
            )
        return cls(project="transformer-engine", root=root, version=checkout.read_text().strip())


def _distribution(root: Path, project: str) -> importlib.metadata.Distribution | None:
    name = {"megatron-lm": "megatron-core", "transformer-engine": "transformer-engine"}[project]
    return next(iter(importlib.metadata.distributions(name=name, path=[str(root)])), None)


def series_for(target: Target, every: Sequence[Series], *, as_version: str | None = None) -> Series:
    """Return the series for a target's version, or for the version that a fork descends from.

    Raises:
        PatchError: no series matches; the error names the available versions.
    """
    version = as_version or target.version
    known = [series for series in every if series.project == target.project]
    for series in known:
        if version in series.versions:
            return series
    versions = ", ".join(version for series in known for version in series.versions)
    raise PatchError(
        f"{target.root} is {TITLES[target.project]} {version}, and there are patches for {versions}; if it is a fork "
        "of one of these with its own version numbers, set --as-version"
    )


def nearest(target: Target, every: Sequence[Series]) -> Series:
    """Return the series of a target's project with the most hunks that fit, for a version without a series."""
    known = [series for series in every if series.project == target.project]

    def misfits(series: Series) -> int:
        return sum(len(file.problems.get(False, ())) for file in examine(target, series))

    return min(reversed(known), key=misfits)


class State(enum.Enum):
    """State of a target's file against its series."""

    ORIGINAL = "not applied"
    PATCHED = "applied"
    OTHER = "does not fit"


@dataclass(frozen=True, kw_only=True)
class FileState:
    """A file of a target, examined.

    Attributes:
        path: path of the file.
        name: path relative to the target.
        state: state of the file.
        before: its bytes; None if the file does not exist.
        after: its bytes with the series toggled: applied if it is not, reverted if it is; None for no file.
        moved: descriptions of hunks that were found at another line.
        problems: descriptions of hunks that were not found, by direction (False: apply, True: revert). Empty unless
            OTHER.
    """

    path: Path
    name: str
    state: State
    before: bytes | None
    after: bytes | None
    moved: tuple[str, ...] = ()
    problems: dict[bool, tuple[str, ...]]


def examine(target: Target, series: Series) -> list[FileState]:
    """Return the state of every file that a series changes.

    Raises:
        PatchError: git is not installed.
    """
    if shutil.which("git") is None:
        raise PatchError("git is not installed: its git apply applies the patches; install git")
    names = sorted({name for patch in series.patches for name in patch.files if _belongs(target, patch, name)})
    return [_examine_file(target, name, [p for p in series.patches if name in p.files]) for name in names]


# A wheel contains only these folders, and not the other files that a patch changes.
_PACKAGES = ("megatron/core/", "transformer_engine/")


def _belongs(target: Target, patch: Patch, name: str) -> bool:
    """Return whether a target can contain a file: only a checkout has tests and scripts."""
    path = target.root / name
    return name.startswith(_PACKAGES) or (path.parent.is_dir() if patch.creates(name) else path.exists())


def left_out(target: Target, series: Series) -> list[str]:
    """Return the files of a series that the target cannot contain."""
    return sorted({name for patch in series.patches for name in patch.files if not _belongs(target, patch, name)})


def _examine_file(target: Target, name: str, patches: list[Patch]) -> FileState:
    path = target.root / name
    if not path.is_file() and not patches[0].creates(name):
        missing = tuple(
            f"{name}, hunk {number} of {len(hunks)} ({hunk.header}) of {patch.path.name}: the file is missing"
            for patch in patches
            for hunks in (patch.hunks(name),)
            for number, hunk in enumerate(hunks, 1)
        )
        problems = {False: missing, True: missing}
        return FileState(path=path, name=name, state=State.OTHER, before=None, after=None, problems=problems)
    before = path.read_bytes() if path.is_file() else None
    # Revert first: a file without the patch lacks the added lines.
    reverted = _git_apply(name, before, patches[::-1], reverse=True) if before is not None else _Result(None, (), ("",))
    if not reverted.problems:
        return FileState(
            path=path,
            name=name,
            state=State.PATCHED,
            before=before,
            after=reverted.content,
            moved=reverted.moved,
            problems={},
        )
    applied = _git_apply(name, before, patches, reverse=False)
    return FileState(
        path=path,
        name=name,
        state=State.OTHER if applied.problems else State.ORIGINAL,
        before=before,
        after=None if applied.problems else applied.content,
        moved=applied.moved,
        problems={False: applied.problems, True: reverted.problems} if applied.problems else {},
    )


@dataclass(frozen=True)
class _Result:
    """A file's bytes with its part of some patches applied, None for no file; hunks that have moved; and that do not
    fit."""

    content: bytes | None
    moved: tuple[str, ...]
    problems: tuple[str, ...]


def _git_apply(name: str, content: bytes | None, patches: Sequence[Patch], *, reverse: bool) -> _Result:
    moved: list[str] = []
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="patches_") as scratch:
        copy = Path(scratch, name)
        copy.parent.mkdir(parents=True, exist_ok=True)
        if content is not None:
            copy.write_bytes(content)
        for patch in patches:
            before = copy.read_text() if copy.is_file() else ""
            command = ["git", "apply", "--verbose", "--reject", "--whitespace=nowarn", f"--include={name}"]
            result = subprocess.run(
                [*command, *(["--reverse"] if reverse else []), str(patch.path)],
                cwd=scratch,
                env=_git_environment(scratch),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            hunks = patch.hunks(name)
            for number, line, offset in re.findall(
                r"^Hunk #(\d+) succeeded at (\d+) (\(offset .*\))\.$", result.stdout, flags=re.MULTILINE
            ):
                hunk = hunks[int(number) - 1]
                moved.append(
                    f"{name}: hunk {number} of {patch.path.name} is at line {line}, "
                    f"not {hunk.start(reverse=not reverse)} {offset}"
                )
            rejected = [int(number) for number in re.findall(r"^Rejected hunk #(\d+)\.$", result.stdout, re.MULTILINE)]
            if result.returncode and not rejected:
                # The patch adds a file that already exists, or removes one that is missing.
                problems.append(f"{name}: another file than {patch.path.name} adds")
            problems += [
                f"{name}, hunk {number} of {len(hunks)} ({hunks[number - 1].header}) of {patch.path.name}"
                f": {_difference(hunks[number - 1], before, reverse=reverse)}"
                for number in rejected
            ]
        return _Result(copy.read_bytes() if copy.is_file() else None, tuple(moved), tuple(problems))


def _difference(hunk: Hunk, content: str, *, reverse: bool) -> str:
    """Describe the probable place of a hunk that was not found, and the first line that differs there."""
    expected, lines = hunk.expected(reverse=reverse), content.splitlines()
    start = hunk.start(reverse=reverse)
    places: dict[str, list[int]] = {}
    for index, line in enumerate(lines):
        places.setdefault(line, []).append(index)
    # Each line that is found votes for the start of the hunk that matches its position.
    votes: dict[int, float] = {}
    for offset, line in enumerate(expected):
        for index in places.get(line, []) if line.strip() else []:
            votes[index - offset] = votes.get(index - offset, 0) + 1 / len(places[line])
    if not votes:
        return f"expected at line {start}; none of its lines is in the file"
    best = max(votes, key=lambda begin: (votes[begin], -abs(begin + 1 - start)))
    for offset, line in enumerate(expected):
        index = best + offset
        there = lines[index] if 0 <= index < len(lines) else None
        if there != line:
            stands = "the file ends" if there is None else f"stands {there.strip()!r}"
            return f"expected at line {start}, found at line {best + 1}, where line {index + 1} should be " + (
                f"{line.strip()!r} and {stands}" if there is None else f"{line.strip()!r} but {stands}"
            )
    return f"expected at line {start}; its lines are at line {best + 1}, but not only there"


def _git_environment(scratch: str) -> dict[str, str]:
    """Return an environment that ignores the caller's repository and configuration, with English messages."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    return kept | {
        "GIT_CEILING_DIRECTORIES": str(Path(scratch).parent),
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_NOSYSTEM": "1",
        "LC_ALL": "C",
    }


def check_fits(target: Target, series: Series, files: Sequence[FileState], *, revert: bool) -> None:
    """Raise PatchError for files that are neither original nor patched; names every hunk that does not fit."""
    found = [problem for file in files for problem in file.problems.get(revert, ())]
    if not found:
        return
    what, than = ("revert", "the series left") if revert else ("apply", f"{series.base} has")
    raise PatchError(
        f"cannot {what} the patches of {series.title} in {target.root}: other lines than {than} are at "
        f"{'; and at '.join(found)}; nothing was changed"
    )


def replace_files(files: Sequence[FileState]) -> None:
    """Switch all files to their other content, or none.

    All content is first written next to the files. The renames follow, and Ctrl-C waits for them; if one fails, the
    earlier ones are undone.

    Raises:
        OSError: a file cannot be written; no file was changed.
    """
    staged: list[Path] = []
    try:
        pairs = []
        for file in files:
            assert file.state is not State.OTHER
            new, old = (
                None if content is None else _write_beside(file.path, content, staged)
                for content in (file.after, file.before)
            )
            pairs.append((file.path, new, old))
        with _signals_wait():
            done: list[tuple[Path, Path | None]] = []
            try:
                for path, new, old in pairs:
                    _put(new, path)
                    done.append((path, old))
            except BaseException:
                for path, old in done:
                    _put(old, path)
                raise
    finally:
        for leftover in staged:
            leftover.unlink(missing_ok=True)


def _put(staged: Path | None, path: Path) -> None:
    """Move the staged content to a path, or remove the file."""
    if staged is None:
        path.unlink()
    else:
        os.replace(staged, path)


def _write_beside(path: Path, content: bytes, staged: list[Path]) -> Path:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    staged.append(Path(name))
    with os.fdopen(handle, "wb") as file:
        file.write(content)
    if path.exists():
        shutil.copymode(path, name)
    else:
        os.chmod(name, 0o644)
    return staged[-1]


@contextmanager
def _signals_wait() -> Iterator[None]:
    """Delay Ctrl-C and SIGTERM until after the block."""
    received: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = {number: signal.signal(number, lambda number, _: received.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for late in received:
            signal.raise_signal(late)
