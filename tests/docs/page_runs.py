"""Runs of a page's commands, in order, in a reader's folder, and their output next to the page's.

A block of ``bash`` holds commands. A block without a language that follows in the same section shows everything they
print, on both streams; ``...`` on a line stands for any lines, and inside a line for anything. A ``json`` block below a
paragraph that ends in `` `FILE`: `` is the content of that file. ``scripts/render_pages.py`` writes the output blocks.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

from harness.forked_ranks import launch
from page_exceptions import AFTER, SHORTER, SOONER, reason
from page_outputs import rewritten
from pages import ROOT, fences_of

# The files of a reader's clone; the environment and the tests stay outside.
_CLONE = ("recipes", "examples", "scripts")
_TIMEOUT_S = 900.0
# Python's, about upstream's packages; which there are differs between versions.
_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning: .*\n(?:  .*\n)?", flags=re.MULTILINE)
# A terminal draws a bar instead; elsewhere a line every so many seconds.
_PROGRESS = re.compile(r"\w[\w ]*: \d+ of \d+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Commands of a page without comments, and the lines that it shows below them, if any; lines count from 1."""

    line: int
    commands: list[str]
    shown: list[str] | None = None
    at: int = 0


@dataclass(frozen=True, kw_only=True)
class Content:
    """A file that the page gives the reader to save."""

    name: str
    text: str


def parts_of(page: Path) -> list[Block | Content]:
    """Return the commands and files of a reader, in order."""
    lines = page.read_text().splitlines()
    fences = fences_of(page)
    parts: list[Block | Content] = []
    for (first, language, last), after in zip(fences, [*fences[1:], None], strict=False):
        inside = lines[first : last - 1]
        named = re.search(r"`([\w./-]+)`:$", "\n".join(lines[: first - 1]).rstrip())
        if language == "json" and named:
            parts.append(Content(name=named[1], text="\n".join(inside) + "\n"))
        if language != "bash":
            continue
        shown, at = None, 0
        if after and after[1] == "" and not any(line.startswith("#") for line in lines[last : after[0] - 1]):
            shown, at = lines[after[0] : after[2] - 1], after[0] + 1
        parts.append(Block(line=first + 1, commands=_commands("\n".join(inside)), shown=shown, at=at))
    return parts


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of commands."""
    return [part for part in parts_of(page) if isinstance(part, Block)]


def quoted_of(page: Path) -> list[int]:
    """Return the lines where output blocks begin that follow no command."""
    shown = {block.at for block in blocks_of(page)}
    return [first + 1 for first, language, _ in fences_of(page) if language == "" and first + 1 not in shown]


def _commands(block: str) -> list[str]:
    whole = re.sub(r"\\\n\s*", "", block).splitlines()
    return [line for line in whole if shlex.split(line, comments=True)]


@dataclass
class Shell:
    """A reader's shell: a working directory, and the variables that the reader has set."""

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: str) -> tuple[int, str]:
        """Run a line, and return its exit status and its output on both streams."""
        printed = ""
        for one in command.split(" && "):
            status, more = self._run(one)
            printed += more
            if status:
                return status, printed
        return 0, printed

    def _run(self, command: str) -> tuple[int, str]:
        words = shlex.split(self._expanded(command), comments=True)
        name, equals, value = words[0].partition("=")
        if len(words) == 1 and equals and name.isidentifier():
            self.variables[name] = value
            return 0, ""
        if words[0] == "cd":
            self.folder = self.folder / words[1]
            return 0, ""
        environment = {
            name: value
            for name, value in os.environ.items()
            if name not in ("COLUMNS", "LINES", "FORCE_COLOR") and not name.startswith("PYTEST")
        }
        environment |= {"OMP_NUM_THREADS": "1", "NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
        program = _program(words)
        if program is None:
            done = subprocess.run(
                ["bash", "-c", command],
                cwd=self.folder,
                env=environment | self.variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            return done.returncode, done.stdout
        ranks, arguments = program
        with chdir(self.folder):
            code, printed, _ = launch(
                ranks, arguments, environment=environment, timeout_s=_TIMEOUT_S, one_stream=True, path=(str(ROOT),)
            )
        return code, printed

    def _expanded(self, command: str) -> str:
        return re.sub(r"\$(\w+)", lambda found: self.variables.get(found[1], found[0]), command)


def _program(words: list[str]) -> tuple[int, list[str]] | None:
    """Return ranks and the arguments of Python if a command is a Python program; None for others."""
    if words[0] == "mcore-prefix-tree":
        return 1, ["-m", "mcore_prefix_tree", *words[1:]]
    if words[:2] == ["torchrun", "--nproc-per-node"]:
        return int(words[2]), words[3:]
    if Path(words[0]).name == "python":
        return 1, words[1:]
    return None


@dataclass(frozen=True, kw_only=True)
class Ran:
    """A block after its commands have ended."""

    block: Block
    printed: list[str]


class Runs:
    """Folders in which pages have been run, so that a page that continues another finds its files."""

    def __init__(self) -> None:
        self._base = Path(tempfile.mkdtemp(prefix="page_runs_"))
        self._ran: dict[str, tuple[Path, list[Ran]]] = {}

    def close(self) -> None:
        shutil.rmtree(self._base)

    def of(self, page: Path) -> list[Ran]:
        """Run a page if that has not been done, and return its blocks with their commands' output."""
        return self._folder_of(str(page.relative_to(ROOT)))[1]

    def _folder_of(self, name: str) -> tuple[Path, list[Ran]]:
        if name in self._ran:
            return self._ran[name]
        folder = self._base / name.replace("/", "_")
        before = AFTER.get(name)
        if before is None:
            folder.mkdir()
            for part in _CLONE:
                shutil.copytree(ROOT / part, folder / part, ignore=shutil.ignore_patterns("__pycache__"))
            for file, old, new in SHORTER:
                text = (folder / file).read_text()
                assert text.count(old) == 1, f"{file} has no {old}"
                (folder / file).write_text(text.replace(old, new))
        else:
            shutil.copytree(self._folder_of(before)[0], folder)
        shell, ran = Shell(folder=folder), []
        for part in parts_of(ROOT / name):
            if isinstance(part, Content):
                (folder / part.name).write_text(part.text)
            elif not all(reason(name, command) for command in part.commands):
                ran.append(self._block(shell, name, part))
        self._ran[name] = folder, ran
        return self._ran[name]

    def _block(self, shell: Shell, name: str, block: Block) -> Ran:
        printed = ""
        for command in block.commands:
            if reason(name, command):
                continue
            for start, option in () if block.shown else SOONER.items():
                command = command.replace(start, f"{start} {option}")
            status, more = shell.run(command)
            printed += more
            fails = block.shown is not None and any(line.startswith("error: ") for line in block.shown)
            if bool(status) != fails:
                raise AssertionError(f"{name}:{block.line}: {command}\nended with status {status}:\n{more}")
        lines = [line.rstrip() for line in _WARNING.sub("", printed).strip("\n").splitlines()]
        return Ran(block=block, printed=[line for line in lines if not _PROGRESS.fullmatch(line)])


def render(page: Path, runs: Runs) -> str:
    """Return a page with its output blocks written from a run of its commands."""
    lines = page.read_text().splitlines()
    for ran in reversed(runs.of(page)):
        if ran.block.shown is not None:
            start = ran.block.at - 1
            written = rewritten(ran.block.shown, ran.printed)
            for place in (str(ROOT), sys.prefix, tempfile.gettempdir()):
                if any(place in line for line in written):
                    raise ValueError(
                        f"{page.name}:{ran.block.at} would show a path of this machine: cut {place} by hand"
                    )
            lines[start : start + len(ran.block.shown)] = written
    return "\n".join(lines) + "\n"
