"""Runs of a page's commands, in order, in a folder as a reader has it, and their output beside what the page shows.

A block of ``bash`` holds commands. A block without a language that follows in the same section shows everything they
print, on both streams; ``...`` on a line stands for any lines, and inside a line for anything. A ``json`` block below a
paragraph that ends in `` `FILE`: `` is the content of that file. ``scripts/render_pages.py`` writes the output blocks.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path

from harness.forked_ranks import launch
from page_exceptions import AFTER, SHORTER, reason
from pages import ROOT, fences_of

# What a reader of a clone has; the environment and the tests stay outside.
_CLONE = ("recipes", "examples", "scripts")
_TIMEOUT_S = 900.0
# Python's, about upstream's packages; which there are differs between versions.
_WARNING = re.compile(r"^\S+\.py:\d+: \w*Warning: .*\n(?:  .*\n)?", flags=re.MULTILINE)
# A terminal draws a bar instead; elsewhere a line every so many seconds.
_PROGRESS = re.compile(r"\w[\w ]*: \d+ of \d+")


@dataclass(frozen=True, kw_only=True)
class Block:
    """Commands of a page, and the lines that it shows below them.

    Attributes:
        line: of the first command, from 1.
        commands: without continuation lines and comments.
        shown: lines of the output block; None if there is no such block.
        at: line of the first shown line, from 1.
    """

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
    """Return what a reader runs and saves, in order."""
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
    """A reader's shell.

    Attributes:
        folder: where the reader is.
        variables: that the reader has set.
    """

    folder: Path
    variables: dict[str, str] = field(default_factory=dict)

    def run(self, command: str) -> tuple[int, str]:
        """Run a line, and return its exit status and what it prints on both streams."""
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
    """Return ranks and the arguments of Python where a command is a Python program; None for others."""
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
        """Run a page if that has not been done, and return its blocks with what their commands printed."""
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
            status, more = shell.run(command)
            printed += more
            fails = block.shown is not None and any(line.startswith("error: ") for line in block.shown)
            if bool(status) != fails:
                raise AssertionError(f"{name}:{block.line}: {command}\nended with status {status}:\n{more}")
        lines = [line.rstrip() for line in _WARNING.sub("", printed).splitlines()]
        return Ran(block=block, printed=[line for line in lines if not _PROGRESS.fullmatch(line)])


# -- comparing

_NUMBER = r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?"
_MEASURED = re.compile(r"\s*(?:s|ms|us|µs|%|[KMG]i?B|k? ?tok(?:ens)?/s|[MGT]?FLOP/s)(?:\W|$)")
_PIECE = re.compile(rf"(?P<any>\.\.\.)|(?P<number>(?<![\w.]){_NUMBER}|(?<=[A-Za-z]){_NUMBER})|(?P<space>\s+)|(?P<rule>[─━-]{{3,}})")


def _pattern(shown: str) -> tuple[re.Pattern[str], list[tuple[str, bool]]]:
    """Return a pattern of a shown line, and of each number its text and whether a clock or a memory gave it."""
    built, numbers, end = "", [], 0
    for piece in _PIECE.finditer(shown):
        built += re.escape(shown[end : piece.start()])
        if piece["any"]:
            built += ".*"
        elif piece["number"]:
            built += f"({_NUMBER})"
            numbers.append((piece["number"], _MEASURED.match(shown, piece.end()) is not None))
        else:
            built += r"\s+" if piece["space"] else r"[─━-]+"
        end = piece.end()
    return re.compile(built + re.escape(shown[end:]) + r"\s*"), numbers


def same_line(shown: str, printed: str) -> bool:
    """Tell whether a printed line is the one that a page shows.

    Words are equal. Whole numbers and numbers in front of an ``x`` are equal; decimals, which processors round
    differently, agree within a hundredth or 1e-5; what a clock or a memory has measured may be any number.
    """
    pattern, numbers = _pattern(shown)
    found = pattern.fullmatch(printed)
    if found is None:
        return False
    for at, (text, measured) in enumerate(numbers, start=1):
        ratio = printed[found.end(at) : found.end(at) + 1] == "x"
        if measured or found[at] == text:
            continue
        if ratio or "." not in text + found[at]:
            return False
        one, other = float(text.replace(",", "")), float(found[at].replace(",", ""))
        if abs(one - other) > max(1e-2 * abs(one), 1e-5):
            return False
    return True


def _unwrapped(lines: list[str]) -> list[str]:
    """Join what a step reports below its line: where that is broken depends on the length of its numbers."""
    joined: list[str] = []
    below = False
    for line in lines:
        goes_on = line.startswith("  ") and below
        if goes_on and joined[-1].startswith("  "):
            joined[-1] += " |" + line[1:]
        else:
            joined.append(line)
        below = goes_on or line.startswith("step ")
    return joined


def _segments(shown: list[str]) -> list[list[str]]:
    """Return the runs of lines between lines of ``...``; the first and the last may be empty."""
    runs: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == "...":
            runs.append([])
        else:
            runs[-1].append(line)
    return runs


def _positions(shown: list[str], printed: list[str]) -> Iterator[tuple[list[str], range]]:
    """Yield each run of shown lines with the places in the printed lines where it may begin."""
    runs, free = _segments(shown), 0
    for number, run in enumerate(runs):
        last = len(printed) - len(run)
        if len(runs) == 1:
            yield run, range(0, 1 if last == 0 else 0)
        elif number == 0:
            yield run, range(0, 1)
        elif number == len(runs) - 1 and run:
            yield run, range(max(last, 0), last + 1)
        elif run:
            yield run, range(free, last + 1)
        free += 1 if run else 0


def difference(shown: list[str], printed: list[str]) -> str | None:
    """Return how a page's output block differs from what its commands print; None if it shows that."""
    free, printed = 0, _unwrapped(printed)
    for run, places in _positions(_unwrapped(shown), printed):
        for at in places:
            window = printed[at : at + len(run)]
            if at >= free and len(window) == len(run) and all(map(same_line, run, window)):
                free = at + len(run)
                break
        else:
            return "\n".join(["shown:", *run, "printed:", *printed])
    return None


# -- rewriting


def rewritten(shown: list[str], printed: list[str]) -> list[str]:
    """Return an output block with the same cuts, of what the commands print now."""
    if [line for line in shown if line.strip() == "..."] == []:
        return [_cut(old, new) for old, new in _paired(shown, printed)]
    lines: list[str] = []
    runs, free = _segments(shown), 0
    for number, run in enumerate(runs):
        if number:
            lines.append("...")
        if not run:
            continue
        at = 0 if number == 0 else len(printed) - len(run) if number == len(runs) - 1 else _place(run, printed, free)
        lines += [_cut(old, new) for old, new in _paired(run, printed[at : at + len(run)])]
        free = at + len(run)
    return lines


def _masked(line: str) -> str:
    return re.sub(r"\s+", " ", re.sub(_NUMBER, "#", line))


def _alike(one: str, other: str) -> float:
    same_step = one.split(" | ")[0] == other.split(" | ")[0]
    return same_step + difflib.SequenceMatcher(None, _masked(one), _masked(other), autojunk=False).ratio()


def _place(run: list[str], printed: list[str], free: int) -> int:
    """Return where a run of shown lines begins in what is printed now: where the two are most alike."""
    places = range(free, max(len(printed) - len(run), free) + 1)
    return max(places, key=lambda at: sum(map(_alike, run, printed[at : at + len(run)])))


def _paired(old: list[str], new: list[str]) -> Iterator[tuple[str, str]]:
    for line in new:
        yield max(old, key=lambda one: _alike(one, line), default=""), line


def _cut(old: str, new: str) -> str:
    """Return a printed line with the ``...`` of the line that stood there."""
    if "..." not in old or _alike(old.partition("...")[0], new[: old.index("...")]) < 0.6:
        return new
    if old.endswith("| ..."):
        fields = new.split(" | ")
        return " | ".join([*fields[: old.count(" | ")], "..."])
    before, after = old.split("...", 1)
    masked = _pattern(f"{before}...{after}")[0]
    if masked.fullmatch(new):
        tail = re.search(masked_tail(after), new)
        head = new[: len(before)]
        return head + "..." + (tail[0] if after and tail else "")
    return new


def masked_tail(after: str) -> str:
    return _pattern(after)[0].pattern.removesuffix(r"\s*") + r"\s*$"


def render(page: Path, runs: Runs) -> str:
    """Return a page with its output blocks written from a run of its commands."""
    lines = page.read_text().splitlines()
    for ran in reversed(runs.of(page)):
        if ran.block.shown is not None:
            start = ran.block.at - 1
            lines[start : start + len(ran.block.shown)] = rewritten(ran.block.shown, ran.printed)
    return "\n".join(lines) + "\n"
