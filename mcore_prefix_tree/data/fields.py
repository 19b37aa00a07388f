"""Names of the fields that records have, ours and the file's."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from mcore_prefix_tree.data.formats import FIELDS, KNOWN
from mcore_prefix_tree.data.keys import FORMATS_BY_NAME, is_known
from mcore_prefix_tree.data.messages import KEYS_OF_MESSAGES
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.choices import DataFormat


@dataclass(frozen=True, kw_only=True)
class FieldNames:
    """The file's names of our fields, and the handling of its other fields.

    Raises:
        ValueError: a name is not one of ours, or two fields have the same name in the file.
    """

    # The file's name of each field, by our name; None for a field with another use in the file.
    given: Mapping[str, str | None] = field(default_factory=dict)
    format: DataFormat | None = None  # trainer or engine whose names the file has, unless ``given`` says otherwise
    # Whether samples carry the unread fields, see ``Sample.carried``; excluded records are then kept too.
    keeps_others: bool = False
    may_lack: bool = False  # whether all records may lack a name of ``given``

    def __post_init__(self) -> None:
        check_names(self.given)

    @cached_property
    def renamed(self) -> dict[str, str | None]:
        """Our names by the file's, those of ``given`` and then the format's."""
        given = {theirs: mine for mine, theirs in self.given.items() if theirs is not None}
        table = FORMATS_BY_NAME[self.format] if self.format is not None else {}
        return {**given, **table, **given}

    def of_file(self, names: Iterable[str], source: str) -> dict[str, str]:
        """Return our names of those of a file's fields that are read or known; raise SampleError for one given twice.

        A field that only seems to be ours keeps its name, for an error.
        """
        found: dict[str, str] = {}
        for name in names:
            mine = self.renamed.get(name, name)
            if mine is None or (name == mine and (name in self.given or not (name in KNOWN or is_known(name)))):
                continue
            if found.setdefault(mine, name) != name:
                raise SampleError(
                    f"{source}: fields '{found[mine]}' and '{name}' are both read as '{mine}'; name one in data.fields"
                )
        return {name: mine for mine, name in found.items()}

    def of_message(self, message: Any) -> Any:
        """Return a message with our names of its keys."""
        if not isinstance(message, dict) or not self.renamed.keys() & message.keys():
            return message
        return {self.renamed.get(name) or name: value for name, value in message.items()}

    def theirs(self, name: str) -> str:
        """Return the file's name of a field of ours."""
        return next((theirs for theirs, mine in self.renamed.items() if mine == name), name)

    def files_of(self, read: Collection[str]) -> set[str]:
        """Return the file's names of fields of ours."""
        return (set(read) - self.given.keys()) | {theirs for theirs, mine in self.renamed.items() if mine in read}

    def check_seen(self, seen: Collection[str], paths: Sequence[str]) -> None:
        """Raise SampleError, naming ``paths``, if a given name is not among the names that any record has."""
        for mine, theirs in self.given.items():
            if theirs is not None and theirs not in seen and not self.may_lack and mine in FIELDS:
                raise SampleError(
                    f"{', '.join(paths)}: no record has the field '{theirs}', which data.fields reads as '{mine}'; "
                    "correct the name, or remove it"
                )


def check_names(given: Mapping[str, str | None]) -> None:
    """Raise ValueError if a name is not one of our fields, or two fields have the same name in the file."""
    by_theirs: dict[str, str] = {}
    for mine, theirs in given.items():
        if mine not in (*FIELDS, *KEYS_OF_MESSAGES) and (theirs is not None or not (mine in KNOWN or is_known(mine))):
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
