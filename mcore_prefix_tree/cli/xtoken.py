"""``mcore-prefix-tree xtoken``: prepare distillation from a teacher that has another tokenizer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_prefix_tree.cli.options import (
    accept_count,
    accept_path,
    check_output_option,
    load_job,
    local_data,
    local_file,
    overrides_like,
    takes,
)
from mcore_prefix_tree.cli.samples import parse_json_object
from mcore_prefix_tree.utils.choices import Aligner, OnError, Rendering

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from mcore_prefix_tree.data import ChatTokenizer
    from mcore_prefix_tree.xtoken.pairs import Pair, Pairing
    from mcore_prefix_tree.xtoken.projection import Projection
    from mcore_prefix_tree.xtoken.projection_build import Vocabularies
    from mcore_prefix_tree.xtoken.token_bytes import Spelled, TokenBytes

app = typer.Typer(no_args_is_help=True, help="Prepare distillation from a teacher that has another tokenizer.")
_FILES = "safetensors, or NeMo-RL's format if it ends in .pt. A file that is there is overwritten."
_KINDS = 8
_NAMES = "mistral-v7, mistral-v3, mistral-v3-tekken, or a folder with a Hugging Face tokenizer."


@dataclass(frozen=True, kw_only=True)
class Tokenizers:
    """The student's and the teacher's tokenizer."""

    student: Annotated[str, accept_path("NAME", f"The student's tokenizer: {_NAMES}")]
    teacher: Annotated[str, accept_path("NAME", "The teacher's, named in the same way.")]
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

        kwargs = parse_json_object(self.student_chat_template_kwargs, "--student-chat-template-kwargs")
        student = load_tokenizer(self.student, kwargs)
        kwargs = parse_json_object(self.teacher_chat_template_kwargs, "--teacher-chat-template-kwargs")
        return student, load_tokenizer(self.teacher, kwargs)

    def vocabularies(self) -> Vocabularies:
        from mcore_prefix_tree.xtoken.projection_build import Vocabularies

        return Vocabularies(*self.load())


Input = Annotated[
    Path, typer.Argument(parser=local_file, metavar="FILE", help="A projection: safetensors, or NeMo-RL's .pt.")
]
ScaleColumn = Annotated[
    bool, typer.Option("--scale-column", help="Keep the last column of a NeMo-RL file made with its scale trick.")
]


@app.command()
@takes(Tokenizers)
def build_projection(
    tokenizers: Tokenizers,
    output: Annotated[Path, typer.Argument(parser=local_file, metavar="OUTPUT", help=_FILES)],
    top_k: Annotated[int, accept_count("K", "Entries of a row.")] = 32,
    tokens_kept: Annotated[int, accept_count("N", "A token is written as at most so many of the other's.")] = 4,
    reverse: Annotated[
        bool, typer.Option("--reverse/--no-reverse", help="Write the teacher's tokens in the student's, too.")
    ] = True,
    special_similarity: Annotated[
        float, typer.Option(min=0.0, metavar="X", help="Map special tokens whose names are as similar; above 1, none.")
    ] = 0.3,
) -> None:
    """Build a projection by writing the tokens of each vocabulary in the other's.

    The same tokenizers and options give the same bytes.
    """
    from mcore_prefix_tree.xtoken.projection_build import BuildSettings

    check_output_option("OUTPUT", output, tokenizers.names)
    settings = BuildSettings(
        top_k=top_k, tokens_kept=tokens_kept, reverse=reverse, special_similarity=special_similarity
    )
    vocabularies = tokenizers.vocabularies()
    with _progress("tokens") as told:
        projection = vocabularies.build(settings, progress=told)
    _write(output, projection, vocabularies)


@app.command()
@takes(Tokenizers)
def apply_exact_map(
    tokenizers: Tokenizers,
    projection: Input,
    output: Annotated[Path, accept_path("OUTPUT", _FILES, local_file)],
    scale_column: ScaleColumn = False,
) -> None:
    """Map each token that both vocabularies have only to itself; other rows stay as they are."""
    check_output_option("--output", output, [*tokenizers.names, projection])
    read, vocabularies = _read(projection, tokenizers, scale_column=scale_column)
    _write(output, vocabularies.exact_map(read), vocabularies)


@app.command()
@takes(Tokenizers)
def trim(
    tokenizers: Tokenizers,
    projection: Input,
    output: Annotated[Path, accept_path("OUTPUT", _FILES, local_file)],
    top_k: Annotated[int, accept_count("K", "Entries of a row that are kept.")],
    scale_column: ScaleColumn = False,
) -> None:
    """Keep the heaviest entries of each row, and let them add up to 1."""
    from mcore_prefix_tree.xtoken.projection import trim as trimmed

    check_output_option("--output", output, [*tokenizers.names, projection])
    read, vocabularies = _read(projection, tokenizers, scale_column=scale_column)
    _write(output, trimmed(read, top_k), vocabularies)


@app.command()
@takes(Tokenizers)
def inspect_alignment(
    tokenizers: Tokenizers,
    files: Annotated[
        list[str],
        typer.Argument(
            parser=local_data, metavar="FILE...", help="JSON Lines (.gz too), Parquet or Arrow files, or globs."
        ),
    ],
    samples: Annotated[int, accept_count("N", "Samples to show.")] = 1,
    chunks: Annotated[int, accept_count("N", "Chunks to show of each sample.")] = 40,
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

    from mcore_prefix_tree.cli.console import say, say_line, show
    from mcore_prefix_tree.data import Skipped
    from mcore_prefix_tree.xtoken.pairs import Pairing, iter_pairs

    pairing, skipped, console = Pairing(*tokenizers.load(), aligner=aligner), Skipped(), Console()
    records = iter_pairs(
        files, pairing, rendering=rendering, expand_turns=expand_turns, on_error=on_error, skipped=skipped
    )
    for pair in islice((pair for pairs in records for pair in pairs), samples):
        sizes = f"{len(pair.student):,} student tokens, {len(pair.teacher):,} teacher tokens, {len(pair):,} chunks"
        say_line(console, f"{pair.student.source}: {sizes}")
        show(console, alignment_table(pair, pairing, chunks))
        say(console, _summary(pair, chunks))
    if skipped:
        typer.echo(str(skipped), err=True)


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
    from mcore_prefix_tree.cli.console import grid

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


@app.command()
def export_teacher(
    recipe: Annotated[str, typer.Argument(metavar="RECIPE", help="The student's, with objective.name=xtoken.")],
    output: Annotated[
        str,
        accept_path(
            "FILE",
            "One sample per line in the data's order: JSON Lines (.jsonl, .json, or packed with .gz), or a "
            ".parquet, .arrow or .feather file. An existing file is replaced once all samples are exported.",
        ),
    ],
    overrides: Annotated[list[str] | None, overrides_like("data.path=held_out.jsonl")] = None,
    top_k: Annotated[int, accept_count("K", "Tokens of each row, the teacher's likeliest.")] = 64,
) -> None:
    """Write every sample of a student's data with the likeliest tokens of its teacher, which has another tokenizer.

    The teacher is the last checkpoint of objective.teacher_recipe, in the parallel layout of that recipe. A student
    trains on the lines with objective.options.teacher=top_k. Under torchrun for several ranks.
    """
    outputs = [partial(check_output_option, "--output", output, is_of_rows=True)]
    loaded = load_job(recipe, overrides, "export teacher", outputs=outputs)
    from mcore_prefix_tree.mcore.loop.score_recipe import run_export_teacher

    report, is_main = run_export_teacher(loaded, output, top_k=top_k)
    if is_main:
        print(*report.lines(output), sep="\n")


def _read(path: Path, tokenizers: Tokenizers, *, scale_column: bool) -> tuple[Projection, Vocabularies]:
    from mcore_prefix_tree.xtoken.projection_file import read_projection

    both = tokenizers.vocabularies()
    return read_projection(path, student=both.student, teacher=both.teacher, scale_column=scale_column), both


def _write(path: Path, projection: Projection, vocabularies: Vocabularies) -> None:
    import numpy as np

    from mcore_prefix_tree.xtoken.projection_file import write_projection

    names = {"student_name": vocabularies.student.name, "teacher_name": vocabularies.teacher.name}
    write_projection(path, projection, **names)
    mapped, alone = projection.columns[:, 0] >= 0, projection.weights[:, 0] == 1
    reached = len(np.unique(projection.columns[projection.columns >= 0]))
    typer.echo(
        f"{path}: {np.count_nonzero(mapped):,} of {projection.student_vocab_size:,} student tokens are mapped, "
        f"{np.count_nonzero(alone):,} of them to only one token; {reached:,} of {projection.teacher_vocab_size:,} "
        "teacher tokens are reached"
    )


@contextmanager
def _progress(unit: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on a terminal, on standard error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn(unit), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(unit, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
