"""``mcore-prefix-tree xtoken inspect-alignment``: the chunks of a file's first samples."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_prefix_tree.cli.options import local_data, takes
from mcore_prefix_tree.utils.choices import Aligner, OnError, Rendering
from mcore_prefix_tree.utils.inputs import MOST

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mcore_prefix_tree.xtoken.pairs import Pair, Pairing
    from mcore_prefix_tree.xtoken.token_bytes import Spelled, TokenBytes
from dataclasses import dataclass

from mcore_prefix_tree.cli.options import local
from mcore_prefix_tree.cli.samples import parse_json_object

if TYPE_CHECKING:
    from mcore_prefix_tree.data import ChatTokenizer
    from mcore_prefix_tree.xtoken.projection_build import Vocabularies

_NAMES = "mistral-v7, mistral-v3, mistral-v3-tekken, or a folder with a Hugging Face tokenizer."


@dataclass(frozen=True, kw_only=True)
class Tokenizers:
    """The student's and the teacher's tokenizer."""

    student: Annotated[str, typer.Option(parser=local, metavar="NAME", help=f"The student's tokenizer: {_NAMES}")]
    teacher: Annotated[str, typer.Option(parser=local, metavar="NAME", help="The teacher's, named in the same way.")]
    student_chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Additional variables of the student's chat template.")
    ] = None
    teacher_chat_template_kwargs: Annotated[
        str | None, typer.Option(metavar="JSON", help="Additional variables of the teacher's chat template.")
    ] = None

    @property
    def names(self) -> list[str]:
        return [self.student, self.teacher]

    def load(self) -> tuple[ChatTokenizer, ChatTokenizer]:
        """Return both; raises ValueError for a name or template that cannot be used."""
        from mcore_prefix_tree.data import load_tokenizer

        student, teacher = (
            load_tokenizer(name, parse_json_object(given, option))
            for name, given, option in (
                (self.student, self.student_chat_template_kwargs, "--student-chat-template-kwargs"),
                (self.teacher, self.teacher_chat_template_kwargs, "--teacher-chat-template-kwargs"),
            )
        )
        return student, teacher

    def vocabularies(self) -> Vocabularies:
        from mcore_prefix_tree.xtoken.projection_build import Vocabularies

        return Vocabularies(*self.load())


_KINDS = 8


@takes(Tokenizers)
def inspect_alignment(
    tokenizers: Tokenizers,
    files: Annotated[
        list[str],
        typer.Argument(
            parser=local_data, metavar="FILE...", help="JSON Lines (.gz too), Parquet or Arrow files, or globs."
        ),
    ],
    samples: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Samples to show.")] = 1,
    chunks: Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="Chunks to show of each sample.")] = 40,
    expand_turns: Annotated[
        bool, typer.Option("--expand-turns", help="One sample per assistant turn, its complete history as prefix.")
    ] = False,
    rendering: Annotated[
        Rendering, typer.Option(help="The teacher reads the student's text, or messages in its own chat format.")
    ] = "student",
    aligner: Annotated[
        Aligner, typer.Option(help="dynamic also aligns text that the tokenizers normalise differently.")
    ] = "bytes",
    on_error: Annotated[
        OnError, typer.Option(help="raise: end at the first bad sample. skip: skip bad samples and report them.")
    ] = "raise",
) -> None:
    """Show which tokens of student and teacher have the same text, in the first samples of some files."""
    from rich.console import Console

    from mcore_prefix_tree.cli.terminal import say, say_line
    from mcore_prefix_tree.data import Skipped
    from mcore_prefix_tree.xtoken.pairs import Pairing
    from mcore_prefix_tree.xtoken.read_pairs import PairReader, iter_pairs

    pairing = Pairing(*tokenizers.load(), aligner=aligner)
    reader, skipped = PairReader(pairing, rendering=rendering, expand_turns=expand_turns), Skipped()
    console = Console()
    records = iter_pairs(files, reader, on_error=on_error, skipped=skipped)
    for pair in islice((pair for pairs in records for pair in pairs), samples):
        say_line(console, _heading(pair))  # with the path of the file
        console.print(alignment_table(pair, pairing, chunks))
        say(console, _summary(pair, chunks))
    if skipped:
        typer.echo(str(skipped), err=True)


def _heading(pair: Pair) -> str:
    return (
        f"{pair.student.source}: {len(pair.student):,} student tokens, {len(pair.teacher):,} teacher tokens, "
        f"{len(pair):,} chunks"
    )


def _summary(pair: Pair, most: int) -> str:
    """Return how much of a pair is aligned, and by which kinds of chunks."""
    import numpy as np

    lengths = [np.diff(side)[:, 0] for side in (pair.alignment.student, pair.alignment.teacher)]
    kinds = Counter(f"{s}:{t}" for s, t in zip(lengths[0].tolist(), lengths[1].tolist(), strict=True))
    scored = int(np.count_nonzero(pair.student.loss_mask[1:]))
    more = f"… {len(pair) - most:,} more chunks\n" if len(pair) > most else ""
    shown = ", ".join(f"{count:,} {kind}" for kind, count in kinds.most_common(_KINDS)) or "no chunks"
    return f"{more}{int(lengths[0].sum()):,} of {scored:,} scored student tokens are aligned: {shown}\n"


def alignment_table(pair: Pair, pairing: Pairing, most: int) -> Table:
    """Return the first chunks of a pair, one per row."""
    from mcore_prefix_tree.cli.terminal import grid

    ranges = list(zip(pair.alignment.student.tolist(), pair.alignment.teacher.tolist(), strict=True))
    table = grid(("chunk", "at", "student", "at", "teacher", "weight"), left=(2, 4))
    spelled = pairing.student.spell(pair.student.tokens), pairing.teacher.spell(pair.teacher.tokens)
    for number, ((s, s_end), (t, t_end)) in enumerate(ranges[:most]):
        table.add_row(
            str(number),
            str(s),
            _shown(pairing.student, pair.student.tokens.tolist(), spelled[0], s, s_end),
            str(t),
            _shown(pairing.teacher, pair.teacher.tokens.tolist(), spelled[1], t, t_end),
            f"{pair.weight[number]:g}",
        )
    return table


def _shown(table: TokenBytes, tokens: list[int], spelled: Spelled, start: int, end: int) -> Text:
    """Return tokens between bars; characters that cannot be printed are escaped, and special tokens are dim."""
    from rich.text import Text

    parts = [Text("|", style="dim")]
    for token in range(start, end):
        if spelled.is_special[token]:
            parts.append(Text(table.special_names.get(tokens[token], f"id {tokens[token]}"), style="dim"))
        else:
            text = spelled.text(token, token + 1).decode("utf-8", "backslashreplace")
            parts.append(Text("".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)))
        parts.append(Text("|", style="dim"))
    return Text.assemble(*parts)
