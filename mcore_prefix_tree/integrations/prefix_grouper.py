"""PrefixGrouper's calls: a prompt once and its completions after it, in a batch with one row per group.

The attention implementation ``prefix_grouper_attention`` of :func:`register_attention` is tree attention: keys of a
prompt are not repeated. :meth:`PrefixGrouper.forward` calls an attention function of the caller, with repeated keys.

Legend: b groups, S completions of all groups, s tokens of a row with its padding, N tokens of all rows without padding,
H heads, D channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.metadata import TreeMetadata


@dataclass(frozen=True)
class Group:
    """Tokens of a prompt, and of each of its completions."""

    prefix_len: int
    suffix_lens: list[int]

    @property
    def total_len(self) -> int:
        return self.prefix_len + sum(self.suffix_lens)


class PrefixGrouper:
    """Converts between separate prompts and completions, and one row per group.

    Args:
        group_info: numbers of tokens of the prompt and of each completion, per group; None leaves that to :meth:`init`.
        device: device of the masks.
        padding_mode: ``"right"``, ``"left"``, or a mask ``[b, s]`` of the tokens of each row.

    Attributes:
        group_info: :class:`Group` per group.
        padding_mask: bool ``[b, s]``, tokens of the rows.
        ungrouped_prefix_mask: bool ``[b, longest prompt]``, padded on the left.
        ungrouped_suffix_mask: bool ``[S, longest completion]``, padded on the right.
        num_samples: int64 ``[b]``, completions of each group.
    """

    def __init__(
        self,
        group_info: Sequence[Sequence[int]] | None = None,
        device: torch.device | str | None = None,
        padding_mode: str | torch.Tensor = "right",
    ) -> None:
        if group_info is not None:
            self.init(group_info, device, padding_mode)

    def init(
        self,
        group_info: Sequence[Sequence[int]],
        device: torch.device | str | None = None,
        padding_mode: str | torch.Tensor = "right",
    ) -> None:
        """Set the groups; raises ValueError if one has no completion, or a mask ``[b, s]`` not its tokens."""
        if not group_info or min(map(len, group_info)) < 2:
            raise ValueError(f"group_info={group_info} must have a group, and each its prompt and a completion")
        self.group_info = [Group(prefix_len=prompt, suffix_lens=list(rest)) for prompt, *rest in group_info]
        self.num_samples = torch.tensor([len(group.suffix_lens) for group in self.group_info], device=device)
        prefixes = [group.prefix_len for group in self.group_info]
        suffixes = [length for group in self.group_info for length in group.suffix_lens]
        totals = [group.total_len for group in self.group_info]
        self.padding_mask = _padding(torch.tensor(totals, device=device), padding_mode)
        self.ungrouped_prefix_mask = _padding(torch.tensor(prefixes, device=device), "left")
        self.ungrouped_suffix_mask = _padding(torch.tensor(suffixes, device=device), "right")
        place = (self.padding_mask.cumsum(1) - 1).masked_fill(~self.padding_mask, -1)
        self.grouped_prefix_mask = (place >= 0) & (place < torch.tensor(prefixes, device=device)[:, None])
        self.grouped_suffix_mask = self.padding_mask & ~self.grouped_prefix_mask
        self.prefix_attn_mask = self.ungrouped_prefix_mask
        self.suffix_attn_mask = self.batch_repeat_cat(self.ungrouped_prefix_mask, self.ungrouped_suffix_mask, 1)
        self._trees: dict[torch.device, TreeMetadata] = {}

    @classmethod
    def from_ungrouped_masks(
        cls,
        prefix_mask: torch.Tensor,
        suffix_mask: torch.Tensor,
        group_sizes: int | Sequence[int],
        device: torch.device | str | None = None,
        padding_mode: str | torch.Tensor = "right",
    ) -> PrefixGrouper:
        """Count the tokens of prompts ``[b, ...]`` and completions ``[S, ...]`` in their masks, padded anywhere.

        ``group_sizes`` are the completions of each group, or of every group.

        Raises:
            ValueError: ``group_sizes`` do not fit the masks.
        """
        sizes = [group_sizes] * len(prefix_mask) if isinstance(group_sizes, int) else list(group_sizes)
        if len(sizes) != len(prefix_mask) or sum(sizes) != len(suffix_mask):
            raise ValueError(
                f"group_sizes={group_sizes} do not fit {len(prefix_mask)} prompts and {len(suffix_mask)} completions"
            )
        suffixes = iter(suffix_mask.long().sum(1).tolist())
        prefixes = prefix_mask.long().sum(1).tolist()
        info = [[prompt, *(next(suffixes) for _ in range(size))] for prompt, size in zip(prefixes, sizes, strict=True)]
        return cls(info, device, padding_mode)

    @staticmethod
    def convert_padding(
        x: torch.Tensor, x_mask: torch.Tensor, padding_mode: str | torch.Tensor = "right"
    ) -> torch.Tensor:
        """Move the tokens ``[rows, s, ...]`` under a mask ``[rows, s]`` as ``padding_mode`` requires; padding is 0."""
        mask = x_mask.bool().to(x.device)
        return _placed(x[mask], _padding(mask.sum(1), padding_mode))

    def metadata(self, device: torch.device) -> TreeMetadata:
        """Return the tree of all rows without their padding, a prompt before its completions; made once per device."""
        if device in self._trees:
            return self._trees[device]
        lengths: list[int] = [0]
        parents: list[int] = []
        for group in self.group_info:
            parents += [-1] + [len(parents)] * len(group.suffix_lens)
            lengths += [group.prefix_len, *group.suffix_lens]
        return self._trees.setdefault(device, TreeMetadata.from_nodes(np.cumsum(lengths), parents, device=device))

    @property
    def position_ids(self) -> torch.Tensor:
        """Return int64 ``[b, s]``: each completion continues the positions of its prompt; 0 for padding."""
        tree = self.metadata(self.padding_mask.device)
        return _placed(tree.tree_position_ids.long()[: tree.num_tokens], self.padding_mask)

    def concat_input(
        self, prefix: torch.Tensor, prefix_mask: torch.Tensor, suffix: torch.Tensor, suffix_mask: torch.Tensor
    ) -> torch.Tensor:
        """Return prompts ``[b, ..., *]`` and completions ``[S, ..., *]`` as rows ``[b, s, *]``; the masks must fit."""
        for name, mask, own in (
            ("prefix_mask", prefix_mask, self.ungrouped_prefix_mask),
            ("suffix_mask", suffix_mask, self.ungrouped_suffix_mask),
        ):
            if mask.long().sum(1).tolist() != (lengths := own.sum(1).tolist()):
                raise ValueError(f"{name} has {mask.long().sum(1).tolist()} tokens in its rows, not {lengths}")
        return self._rows(prefix[prefix_mask.bool().to(prefix.device)], suffix[suffix_mask.bool().to(suffix.device)])

    def split_output(
        self, output: torch.Tensor, include_prefix_last: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return rows ``[b, s, *]`` as prompts ``[b, ..., *]`` and completions ``[S, ..., *]``, each with its mask.

        ``include_prefix_last`` is the number of last positions of a prompt that move to the front of each completion.
        With 1, a completion has the prediction of its first token too.

        Raises:
            ValueError: a prompt is shorter than ``include_prefix_last``.
        """
        if include_prefix_last > (shortest := min(group.prefix_len for group in self.group_info)):
            raise ValueError(f"include_prefix_last={include_prefix_last} exceeds a prompt of {shortest} tokens")
        split: list[torch.Tensor] = []
        for prefix, suffix in (self._parts(output), (self.ungrouped_prefix_mask, self.ungrouped_suffix_mask)):
            cut = prefix.shape[1] - include_prefix_last
            split += [prefix[:, :cut], self.batch_repeat_cat(prefix[:, cut:], suffix, 1)]
        return split[0], split[2], split[1], split[3]

    def ungroup(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return ``[b, H, s, D]`` as q, k and v of the prompts, then of the completions."""
        parts = [self._parts(states.transpose(1, 2)) for states in (q, k, v)]
        return tuple(part[which].transpose(1, 2) for which in (0, 1) for part in parts)

    def group(self, o_prefix: torch.Tensor, o_suffix: torch.Tensor) -> torch.Tensor:
        """Return outputs of prompts ``[b, ..., H, D]`` and completions ``[S, ..., H, D]`` as rows ``[b, s, H, D]``."""
        device = o_prefix.device
        return self._rows(
            o_prefix[self.ungrouped_prefix_mask.to(device)], o_suffix[self.ungrouped_suffix_mask.to(device)]
        )

    def forward(
        self, attn_func: Callable[..., torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Attend by a function of the caller, for all prompts and for all completions; return ``[b, s, H, D]``.

        Args:
            attn_func: function called as ``attn_func(q, k, v, mask, *args, **kwargs)``, with a mask ``[rows, keys]`` of
                tokens. It is causal, and its last query sees all keys, as in flash attention. It returns
                ``[rows, queries, H, D]``.
            q, k, v: ``[b, heads, s, D]``.
        """
        q_prefix, k_prefix, v_prefix, q_suffix, k_suffix, v_suffix = self.ungroup(q, k, v)
        prefix = attn_func(q_prefix, k_prefix, v_prefix, self.prefix_attn_mask.to(q.device), *args, **kwargs)
        keys = self.batch_repeat_cat(k_prefix, k_suffix, 2)
        values = self.batch_repeat_cat(v_prefix, v_suffix, 2)
        suffix = attn_func(q_suffix, keys, values, self.suffix_attn_mask.to(q.device), *args, **kwargs)
        return self.group(prefix, suffix)

    def batch_repeat_cat(self, prefix: torch.Tensor, suffix: torch.Tensor, cat_dim: int) -> torch.Tensor:
        """Put the prompt ``[b, ...]`` before each of its completions ``[S, ...]``, along ``cat_dim``."""
        return torch.cat([prefix.repeat_interleave(self.num_samples.to(prefix.device), dim=0), suffix], dim=cat_dim)

    def _rows(self, prefix: torch.Tensor, suffix: torch.Tensor) -> torch.Tensor:
        """Return tokens of prompts ``[b, ..., *]`` and of completions ``[S, ..., *]`` in rows ``[b, s, *]``."""
        rows = prefix.new_zeros(*self.padding_mask.shape, *prefix.shape[1:])
        device = prefix.device
        rows = rows.index_put(self.grouped_prefix_mask.to(device).nonzero(as_tuple=True), prefix)
        return rows.index_put(self.grouped_suffix_mask.to(device).nonzero(as_tuple=True), suffix)

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return prompts and completions of rows ``[b, s, *]``."""
        prefix = rows[self.grouped_prefix_mask.to(rows.device)]
        suffix = rows[self.grouped_suffix_mask.to(rows.device)]
        return _placed(prefix, self.ungrouped_prefix_mask), _placed(suffix, self.ungrouped_suffix_mask)


def register_attention() -> None:
    """Register ``prefix_grouper_attention`` in Transformers; the model call takes ``prefix_grouper=``."""
    from transformers import AttentionInterface

    AttentionInterface.register("prefix_grouper_attention", _attention)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    *,
    prefix_grouper: PrefixGrouper,
    prefix_grouper_attn_func: object = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Tree attention of the rows, ``[b, H, s, D]`` to ``[b, s, H, D]``; ignores masks and other attention functions."""
    from mcore_prefix_tree.integrations.transformers import attend

    mask = prefix_grouper.padding_mask.to(query.device)
    flat = [states.transpose(1, 2)[mask].transpose(0, 1)[None] for states in (query, key, value)]
    output, _ = attend(module, *flat, prefix_tree=prefix_grouper.metadata(query.device), **kwargs)
    return _placed(output[0], mask), None


def _placed(tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return tokens where a mask ``[rows, s]`` is true, row after row; 0 elsewhere."""
    where = mask.to(tokens.device).nonzero(as_tuple=True)
    return tokens.new_zeros(*mask.shape, *tokens.shape[1:]).index_put(where, tokens)


def _padding(lengths: torch.Tensor, mode: str | torch.Tensor) -> torch.Tensor:
    """Return a mask ``[rows, s]`` of rows with these lengths, int64 ``[rows]``."""
    if isinstance(mode, torch.Tensor):
        mask = mode.bool().to(lengths.device)
        if mask.ndim != 2 or mask.sum(1).tolist() != lengths.tolist():
            raise ValueError(f"padding_mode {tuple(mask.shape)} must have {lengths.tolist()} tokens in its rows")
        return mask
    if mode not in ("left", "right"):
        raise ValueError(f"padding_mode={mode!r} must be 'left', 'right' or a mask")
    place = torch.arange(int(lengths.max()), device=lengths.device)
    return place < lengths[:, None] if mode == "right" else place >= int(lengths.max()) - lengths[:, None]
