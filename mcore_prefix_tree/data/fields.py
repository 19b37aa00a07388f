"""Names of the fields that records have, ours and the file's."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mcore_prefix_tree.data.foreign_names import is_telling
from mcore_prefix_tree.data.formats import FIELDS, KNOWN
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.launchers import is_first_rank


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """The file's names of our fields, and the handling of its other fields.

    Attributes:
        given: the file's name of each field, by our name; None for a field with another use in the file.
        keeps_others: whether samples carry the unread fields, see ``Sample.carried``; excluded records are then kept
            too.
        may_lack: whether all records may lack a name of ``given``.

    Raises:
        ValueError: a name is not one of ours, or two fields have the same name in the file.
    """

    given: Mapping[str, str | None] = field(default_factory=dict)
    keeps_others: bool = False
    may_lack: bool = False

    def __post_init__(self) -> None:
        check_names(self.given)

    def ours(self, name: str) -> str | None:
        """Return our name of a field of the file, or of one that only seems to be ours, for an error; or None."""
        if self.given:
            for mine, theirs in self.given.items():
                if name == theirs:
                    return mine
        return name if (name in KNOWN or is_telling(name)) and name not in self.given else None

    def of_file(self, names: Iterable[str]) -> dict[str, str]:
        """Return our names of those of a file's fields that are read."""
        return {name: mine for name in names if (mine := self.ours(name)) is not None}

    def theirs(self, name: str) -> str:
        """Return the file's name of a field of ours."""
        return self.given.get(name) or name

    def check_seen(self, seen: Collection[str], paths: Sequence[str]) -> None:
        """Raise SampleError, naming ``paths``, if a given name is not among the names that any record has."""
        for mine, theirs in self.given.items():
            if theirs is not None and theirs not in seen and not self.may_lack:
                raise SampleError(
                    f"{', '.join(paths)}: no record has the field '{theirs}', which data.fields reads as '{mine}'; "
                    "correct the name, or remove it"
                )


def check_names(given: Mapping[str, str | None]) -> None:
    """Raise ValueError if a name is not one of our fields, or two fields have the same name in the file."""
    by_theirs: dict[str, str] = {}
    for mine, theirs in given.items():
        if mine not in FIELDS and (theirs is not None or mine not in KNOWN):
            meant = difflib.get_close_matches(mine, FIELDS, n=1)
            way_out = f"is '{meant[0]}' meant?" if meant else f"the fields are {', '.join(FIELDS)}"
            raise ValueError(f"'{mine}' is not a field that samples have; {way_out}")
        if theirs is None:
            continue
        if not isinstance(theirs, str):  # of JSON that nobody checked
            raise ValueError(f"the file's name of '{mine}' is {theirs!r}; it must be text, or null")
        if theirs in by_theirs:
            raise ValueError(f"'{theirs}' is read as '{by_theirs[theirs]}' and as '{mine}'; give each its own field")
        by_theirs[theirs] = mine


# Those of a file that calls all fields as we do.
OUR_NAMES = FieldNames()


logger = logging.getLogger(__name__)

_CLOSE = 0.85
_seen: set[str] = set()


def warn_unknown_fields(names: Iterable[str], known: Collection[str], source: str) -> None:
    """Warn once per process, on the first rank only, of each name that is not among the ``known`` fields."""
    for name in names:
        if name in known or name in _seen:
            continue
        _seen.add(name)
        meant = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if meant and is_first_rank():
            logger.warning("%s: field '%s' is not read; is '%s' meant?", source, name, meant[0])
