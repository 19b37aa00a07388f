"""Checks that all ranks of a job read the same samples: each reads by itself, and nothing later would notice."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from itertools import chain, islice
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from mcore_prefix_tree.sample import NO_SIGNALS, Sample, SampleError
from mcore_prefix_tree.signals import RoutedExperts, SamplingMask, Signals, Teacher
from mcore_prefix_tree.utils.ranks import Ranks, name_ranks

_DEFAULTS = {field.name: field.default for field in fields(Signals)}
_NAMED = 3
_AT_ONCE = 4096


class _Digest(NamedTuple):
    """Input of one rank: the amount in words, a checksum of the content, its machine, the bytes of each file."""

    what: str
    crc: int
    host: str
    files: dict[str, int]


def check_same_samples(groups: Sequence[Sequence[Sample]], paths: Sequence[str], ranks: Ranks) -> None:
    """Check that every rank holds the same samples, after reading or a resume; raise SampleError on every rank if not.

    Compares tokens, masks, merge keys and signals by a checksum that takes milliseconds per million tokens. The error
    names ranks, machines and files. For streamed files see :func:`check_same_files`; samples that one rank reads need
    no check.
    """
    if ranks.size == 1:
        return
    crc = _update_crc(chain.from_iterable(groups), crc32(np.array([len(group) for group in groups]).data))
    samples, tokens = sum(map(len, groups)), sum(map(len, chain.from_iterable(groups)))
    _check_same(f"records: {len(groups):,}, samples: {samples:,}, tokens: {tokens:,}", crc, paths, ranks)


def check_same_files(records: int, paths: Sequence[str], read: Callable[[int], Sequence[Sample]], ranks: Ranks) -> None:
    """Check as :func:`check_same_samples` does, by the sizes and a few records of files that no rank reads completely.

    ``read`` returns the samples of a record; a record for which it raises SampleError counts as empty.
    """
    if ranks.size == 1:
        return
    crc = crc32(repr([_file_size(path) for path in paths]).encode())
    for record in _sample_records(records):
        with suppress(SampleError):  # which is reported when the files are read
            crc = _update_crc(read(record), crc)
    _check_same(f"records: {records:,}", crc, paths, ranks)


def checksum(groups: Sequence[Sequence[Sample]], sizes: npt.NDArray[np.int64], *, all_of_them: bool) -> int:
    """Return a checksum by which a later run recognises samples and their order, even if their signals have changed.

    ``sizes``, int64 ``[n]``, counts the samples of each record. Reads all groups, or four unless ``all_of_them``.
    """
    some = groups if all_of_them else [groups[index] for index in _sample_records(len(groups))]
    return _update_crc(
        chain.from_iterable(some), crc32(np.ascontiguousarray(sizes, dtype=np.int64).data), signals=False
    )


def _sample_records(number: int) -> list[int]:
    """Return the first, the last and two between them."""
    return sorted(set(np.linspace(0, number - 1, 4).astype(int).tolist())) if number else []


def _check_same(what: str, crc: int, paths: Sequence[str], ranks: Ranks) -> None:
    own = _Digest(what, crc, socket.gethostname(), {path: _file_size(path) for path in paths})
    digests: list[_Digest] = ranks.gather(own)
    first = digests[0]
    odd = next((one for one in digests if one[:2] != first[:2]), None)
    if odd is None:
        return
    hosts = [one.host for one in digests]
    theirs = name_ranks([rank for rank, one in enumerate(digests) if one[:2] == odd[:2]], hosts)
    # The files that differ in name or size; all if none does.
    files = sorted(odd.files.items() ^ first.files.items()) or [*first.files.items()]
    named = [f"{path} ({size:,} bytes)" for path, size in files[:_NAMED]]
    named += [f"{len(files) - _NAMED} more"] if len(files) > _NAMED else []
    raise SampleError(
        f"{theirs} read other data ({odd.what}) than {name_ranks([0], hosts)} ({first.what}), from {', '.join(named)}; "
        "give all machines the same files, and the same tokenizer in the same version"
    )


def _file_size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def _update_crc(samples: Iterable[Sample], crc: int, *, signals: bool = True) -> int:
    rest = iter(samples)
    while some := list(islice(rest, _AT_ONCE)):  # many are short, and a checksum's call takes its time
        crc = crc32(np.array([len(sample) for sample in some]).data, crc)
        crc = crc32(np.concatenate([sample.tokens for sample in some]).data, crc)
        crc = crc32(np.concatenate([sample.loss_mask for sample in some]).data, crc)
        for sample in some:
            if sample.merge_key is not None:
                crc = crc32(repr(sample.merge_key).encode(), crc)
            if signals and sample.signals is not NO_SIGNALS:
                crc = _crc_of_signals(sample, crc)
            if signals and sample.renderings:
                crc = _update_crc(sample.renderings, crc)
    return crc


def _crc_of_signals(sample: Sample, crc: int) -> int:
    for name, default in _DEFAULTS.items():
        value = getattr(sample.signals, name)
        # A sample without an id has its line's place, and machines may keep equal files in different places.
        is_place = name in ("group", "rollout", "pair") and f"{sample.source} ".startswith(f"{value} ")
        if value is not default and not is_place:
            crc, parts = crc32(name.encode(), crc), [value.digest if isinstance(value, RoutedExperts) else value]
            if isinstance(value, (Teacher, SamplingMask)):
                parts = [part for part in vars(value).values() if part is not None]
            for part in parts:
                crc = crc32(part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode(), crc)
    return crc


# Name of the checksums among the values that :func:`difference` compares.
CHECKSUMS = "checksums"


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Return the reason why a job's data cannot continue from a checkpoint's, by the first name whose value differs.

    ``before`` and ``now`` hold the values that decide the order of the samples, :data:`CHECKSUMS` last. Returns
    :data:`CHECKSUMS` if as many other samples are read; None if nothing differs.
    """
    for name, value in now.items():
        old = before[name]
        # Checksums are compared by the ways of reading that both runs have.
        if old | value != value | old if name == CHECKSUMS else old != value:
            return name
    return None


def are_new_data(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Return whether a job that declares its data new begins them, and is not started again on the same data."""
    return difference(before, now) is not None or before[CHECKSUMS].keys().isdisjoint(now[CHECKSUMS])
