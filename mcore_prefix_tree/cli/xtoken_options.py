"""Options that the xtoken commands share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from mcore_prefix_tree.cli.options import local
from mcore_prefix_tree.cli.samples import object_of

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
            load_tokenizer(name, object_of(given, option))
            for name, given, option in (
                (self.student, self.student_chat_template_kwargs, "--student-chat-template-kwargs"),
                (self.teacher, self.teacher_chat_template_kwargs, "--teacher-chat-template-kwargs"),
            )
        )
        return student, teacher

    def vocabularies(self) -> Vocabularies:
        from mcore_prefix_tree.xtoken.projection_build import Vocabularies

        return Vocabularies(*self.load())
