"""Data as readers take them: toy tokenizers, files of lines and of tables, and streams that ranks share."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from threading import Barrier, Thread

import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet

from mcore_prefix_tree.data import EncodedTurn, LineOptions, Skipped, StreamedGroups
from mcore_prefix_tree.data.json_fields import ChatError
from mcore_prefix_tree.sample import SampleError
from mcore_prefix_tree.utils.ranks import Ranks


class CharacterTokenizer:
    """One token a character: ``<role letter>content`` for each message, 0 as the end of a turn."""

    name = "characters"
    vocab_size = 128

    def decode(self, tokens):
        return "".join(map(chr, tokens))

    def encode_turns(self, messages, tools=()):
        if any(message.content == "unspeakable" for message in messages):
            raise ChatError("field 'messages' does not fit")
        tokens, turns = [], []
        for message in messages:
            tokens.append(ord(message.role[0].upper()))
            start = len(tokens)
            tokens += [ord(character) for character in message.content]
            if message.role == "assistant":
                tokens.append(0)
                turns.append(EncodedTurn(tokens=np.array(tokens, dtype=np.int32), start=start))
        return turns


def message(role, content, **rest):
    return {"role": role, "content": content, **rest}


CHAT = [
    message("user", "hi"),
    message("assistant", "yo"),
    message("user", "ok"),
    message("assistant", "a"),
    message("user", "?"),
]


class Words:
    """A token a message."""

    name, vocab_size = "words", 9

    def encode_turns(self, messages, tools=()):
        ends = [number + 1 for number, message in enumerate(messages) if message.role == "assistant"]
        return [EncodedTurn(tokens=np.arange(end, dtype=np.int32), start=end - 1) for end in ends]


def write_table(folder, table, form, *, rows_a_chunk=3, name="rows"):
    """A table as a file of some format, in small chunks."""
    folder = Path(folder)
    path = folder / f"{name}.{'arrow' if form in ('stream', 'arrow-lz4') else form}"
    if form == "jsonl":
        path.write_text("".join(f"{json.dumps(row)}\n" for row in table))
        return str(path)
    if isinstance(table, list):
        table = pa.Table.from_pylist(table)
    if form == "parquet":
        pa.parquet.write_table(table, path, row_group_size=rows_a_chunk)
    elif form == "feather":
        pa.feather.write_feather(table, path, compression="lz4", chunksize=rows_a_chunk)
    else:
        new = pa.ipc.new_stream if form == "stream" else pa.ipc.new_file
        options = pa.ipc.IpcWriteOptions(compression="lz4" if form == "arrow-lz4" else None)
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=rows_a_chunk)
    return str(path)


def by_ranks(size, make):
    """``make`` on as many ranks, each a thread; each one's result or error."""
    values, outcomes, barrier = [None] * size, [None] * size, Barrier(size)

    def run(rank):
        def gather(value):
            values[rank] = pickle.loads(pickle.dumps(value))
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        try:
            outcomes[rank] = make(Ranks(rank=rank, size=size, gather=gather))
        except SampleError as error:
            outcomes[rank] = str(error)

    threads = [Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return outcomes


def write_files(folder, *files):
    paths = []
    for number, lines in enumerate(files):
        paths.append(str(folder / f"{number}.jsonl"))
        (folder / f"{number}.jsonl").write_text("".join(f"{text}\n" for text in lines))
    return paths


def told_groups(groups):
    return [[(sample.source, sample.tokens.tolist(), sample.signals.group) for sample in group] for group in groups]


def streamed(paths, by="group", *, step=None, size=1, on_error="raise", check=None):
    """The groups, and their errors; every rank finds the same."""

    def make(ranks):
        skipped, unit = Skipped(), {"grouped_by": by, "step": step, "setting": "the test", "check": check}
        return StreamedGroups(paths, LineOptions(), on_error=on_error, skipped=skipped, ranks=ranks, **unit), skipped

    outcomes = by_ranks(size, make)
    if isinstance(outcomes[0], str):
        assert outcomes == outcomes[:1] * size
        raise SampleError(outcomes[0])
    groups, skipped = outcomes[0]
    assert all(told_groups(other) == told_groups(groups) for other, _ in outcomes[1:])
    assert all(left_out == skipped for _, left_out in outcomes)
    return groups
