"""Samples from files, all of them or a record at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain

from mcore_prefix_tree.data.chat import ChatTokenizer
from mcore_prefix_tree.data.fields import OUR_NAMES, FieldNames
from mcore_prefix_tree.data.files import PathLike, no_samples, read_records, resolve_paths
from mcore_prefix_tree.data.records import LineOptions, samples_of_record
from mcore_prefix_tree.data.skipped import Skipped, check_on_error
from mcore_prefix_tree.sample import Sample
from mcore_prefix_tree.utils.choices import OnError

_PROGRESS_BYTES = 1 << 20


def read_samples(
    paths: PathLike | Iterable[PathLike],
    *,
    tokenizer: ChatTokenizer | None = None,
    expand_turns: bool = False,
    vocab_size: int | None = None,
    limits: Mapping[str, int] | None = None,
    renderings: Sequence[ChatTokenizer] = (),
    names: FieldNames = OUR_NAMES,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
) -> list[Sample]:
    """Return all samples of all files, in order; see :class:`LineOptions` and :func:`iter_sample_groups`."""
    options = LineOptions(
        tokenizer=tokenizer,
        expand_turns=expand_turns,
        vocab_size=vocab_size,
        limits=limits or {},
        renderings=renderings,
        names=names,
    )
    return list(chain.from_iterable(iter_sample_groups(paths, options, on_error=on_error, skipped=skipped)))


def iter_sample_groups(
    paths: PathLike | Iterable[PathLike],
    options: LineOptions | None = None,
    *,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[list[Sample]]:
    """Yield the samples of one record after another; shuffle these lists, because the turns of a line share its prefix.

    A record is a line of JSON Lines, or a row of a ``.parquet``, ``.arrow`` or ``.feather`` file, whose columns are the
    fields: ``tokens``, ``messages`` or another format of :mod:`mcore_prefix_tree.data.formats`, with the fields of
    :class:`~mcore_prefix_tree.signals.Signals` under their own names. A record whose ``exclude`` is true is skipped and
    counted. Other fields are ignored, and a null means that the field is missing.

    Args:
        paths: one or several paths: a file (``.gz`` is unpacked), a glob (sorted), ``-`` for JSON Lines on standard
            input.
        options: settings that the samples of a record depend on.
        on_error: ``"raise"`` ends at the first bad record. ``"skip"`` skips bad data only: a record that cannot be read
            or encoded, or a single turn of one that is too long.
        skipped: counter of skipped samples; without it, a warning at the end reports them.
        progress: function that is called with the bytes read and the bytes in all, now and then.

    Yields:
        lists of at least one sample; ``source`` is ``path:line`` (from 1) or ``path row number`` (from 0), and ``...
        turn k`` (from 0) if expanded.

    Raises:
        SampleError: bad data; one sentence with file, line or row, field and the way out. Also under ``"skip"``, if a
            file cannot be read or nothing is left.
        ImportError: a table needs pyarrow.
        ValueError: ``on_error`` has another value.
    """
    check_on_error(on_error)
    left_out = Skipped()
    resolved = resolve_paths(paths)
    options = options or LineOptions()
    seen: set[str] = set()
    empty = True
    sizes = [os.path.getsize(path) if os.path.isfile(path) else 0 for path in resolved]
    told = 0
    for file, path in enumerate(resolved):
        done = before = sum(sizes[:file])
        for record in read_records(path, options.names):
            samples = samples_of_record(record, options, left_out if on_error == "skip" else None, seen, left_out)
            if samples:
                yield samples
                empty = False
            done = min(done + record.size, before + sizes[file])  # a packed file has fewer bytes than its lines
            if progress is not None and done - told >= _PROGRESS_BYTES:
                told = done
                progress(done, sum(sizes))
    if empty:
        raise no_samples(resolved, left_out)
    options.names.check_seen(seen, resolved)
    if skipped is not None:
        skipped.merge(left_out)
    elif left_out.count:
        warnings.warn(str(left_out), stacklevel=2)
