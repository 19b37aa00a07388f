"""Pairs from data files, one record at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import get_args

from mcore_prefix_tree.data.files import PathLike, no_samples, read_records, resolve_paths
from mcore_prefix_tree.data.records import LineOptions, Record, samples_of_record
from mcore_prefix_tree.data.skipped import Skipped, check_on_error
from mcore_prefix_tree.sample import Sample, SampleError
from mcore_prefix_tree.utils.choices import OnError, Rendering
from mcore_prefix_tree.xtoken.pairs import Pair, Pairing

# The chat format that the teacher reads: its own, or the student's in its own tokens.


class PairReader:
    """Makes the pairs of one record after another."""

    def __init__(
        self,
        pairing: Pairing,
        *,
        rendering: Rendering = "student",
        expand_turns: bool = False,
        student_limits: Mapping[str, int] | None = None,
    ) -> None:
        """Set the conversion of records to pairs.

        Args:
            rendering: text that the teacher reads: ``student`` gives it the text that the student reads; ``own``
                encodes ``messages`` with each side's own chat format. Records of ``tokens`` are in the student's tokens
                and always take the first way.
            student_limits: largest number of the student's tokens, by the name of the setting.

        Raises:
            ValueError: ``rendering`` is neither.
        """
        if rendering not in get_args(Rendering):
            raise ValueError(f"rendering={rendering!r} must be one of {', '.join(map(repr, get_args(Rendering)))}")
        self._pairing = pairing
        self._options = LineOptions(
            tokenizer=pairing.student_tokenizer,
            expand_turns=expand_turns,
            vocab_size=pairing.student.vocab_size,
            limits=student_limits or {},
            renderings=[pairing.teacher_tokenizer] if rendering == "own" else [],
        )

    def of_record(self, record: Record, skipped: Skipped | None = None, left_out: Skipped | None = None) -> list[Pair]:
        """Return the pairs of one record; none for a blank line, or one that is excluded, which ``left_out`` counts.

        Raises:
            SampleError: bad data, or text that cannot be aligned; without ``skipped``, which otherwise counts it.
        """
        samples = samples_of_record(record, self._options, skipped, left_out=left_out)
        pairs = (self._pair(sample, skipped) for sample in samples)
        return [pair for pair in pairs if pair is not None]

    def _pair(self, sample: Sample, skipped: Skipped | None) -> Pair | None:
        try:
            return self._pairing.of(sample)
        except SampleError as error:
            if skipped is None:
                raise
            skipped.add(error, "malformed")
            return None


def iter_pairs(
    paths: PathLike | Iterable[PathLike],
    reader: PairReader,
    *,
    on_error: OnError = "raise",
    skipped: Skipped | None = None,
) -> Iterator[list[Pair]]:
    """Yield the pairs of one record after another; see :func:`mcore_prefix_tree.data.iter_sample_groups`.

    Raises:
        SampleError: see :meth:`PairReader.of_record`; or the files are empty.
        ValueError: ``on_error`` is neither ``raise`` nor ``skip``.
    """
    check_on_error(on_error)
    left_out = Skipped() if skipped is None else skipped
    resolved = resolve_paths(paths)
    empty = True
    for path in resolved:
        for record in read_records(path):
            pairs = reader.of_record(record, left_out if on_error == "skip" else None, left_out)
            if pairs:
                yield pairs
                empty = False
    if empty:
        raise no_samples(resolved, left_out)
