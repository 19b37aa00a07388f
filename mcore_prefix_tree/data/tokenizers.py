"""Tokenizers by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mcore_prefix_tree.data.chat import ChatTokenizer
from mcore_prefix_tree.utils.inputs import local_path
from mcore_prefix_tree.utils.versions import install_command

# v7 does not change the history from turn to turn, so the turns of a rollout share it, and has the small vocabulary.
DEFAULT_TOKENIZER = "mistral-v7"
# v1 and v2 are unsupported: v1 knows no tools and no control tokens, v2 drops the tool calls of earlier turns.
FILES = {
    "mistral-v3": "mistral_instruct_tokenizer_240323.model.v3",
    "mistral-v3-tekken": "tekken_240718.json",
    "mistral-v7": "mistral_instruct_tokenizer_241114.model.v7",
}


def load_tokenizer(
    name_or_path: str = DEFAULT_TOKENIZER, chat_template_kwargs: Mapping[str, Any] | None = None
) -> ChatTokenizer:
    """Load a tokenizer with its chat format; nothing is downloaded.

    Args:
        name_or_path: ``mistral-v7`` (32,768 tokens), ``mistral-v3`` (32,768) or ``mistral-v3-tekken`` (131,072), which
            the mistral-common wheel carries; or the path of a folder with a Hugging Face tokenizer.
        chat_template_kwargs: further variables of a folder's chat template, for example ``enable_thinking``. With
            ``strftime_now``, a date as ``2026-11-20``, a template that reads the clock finds it at that date.

    Raises:
        ValueError: the name is neither; the folder holds no tokenizer, or its chat template is missing or its output
            changes from call to call; or ``chat_template_kwargs`` are not a template's.
        ImportError: the name is a folder and transformers is missing.
        TypeError: the name is not a string or a path.
    """
    if not isinstance(name_or_path, str | os.PathLike):
        raise TypeError(f"the tokenizer's name is a {type(name_or_path).__name__}; give a name or the path of a folder")
    name_or_path = local_path(name_or_path)
    # Both libraries take their time to import, and data that is already tokens needs neither.
    if os.path.isdir(name_or_path):
        try:
            import transformers  # noqa: F401
        except ImportError as error:
            raise ImportError(
                f"tokenizer '{name_or_path}' is a Hugging Face folder, which needs transformers: "
                f"{install_command('hf')}"
            ) from error
        from mcore_prefix_tree.data.huggingface import HuggingFaceChatTokenizer

        return HuggingFaceChatTokenizer(name_or_path, chat_template_kwargs)

    check_tokenizer_named(name_or_path, chat_template_kwargs)
    from mcore_prefix_tree.data.mistral import MistralChatTokenizer

    return MistralChatTokenizer(name_or_path)


def check_tokenizer_named(name_or_path: str, chat_template_kwargs: Mapping[str, Any] | None = None) -> None:
    """Check the arguments of :func:`load_tokenizer` without loading; raise ValueError as it does."""
    if os.path.isdir(name_or_path):
        return
    if name_or_path not in FILES:
        raise ValueError(
            f"tokenizer '{name_or_path}' is neither a folder nor one of {', '.join(sorted(FILES))}; "
            "for a Hugging Face tokenizer give the path of its local folder"
        )
    if chat_template_kwargs:
        raise ValueError(
            f"chat_template_kwargs ({', '.join(chat_template_kwargs)}) are for the chat template of a Hugging Face "
            f"tokenizer; tokenizer '{name_or_path}' has none"
        )
