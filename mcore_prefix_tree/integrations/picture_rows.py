"""Pictures in rows that fold inside a Transformers model: which are equal, and what the model gets for unique tokens.

A picture's token is compared by its id, the digest of its picture's pixels and grid, its place in the picture, and its
positions. The tower runs once for each different picture; each unique token gets its row of the tower's output.

Legend: B, T shape of ``input_ids``; L tokens of all rows, P unique ones; N pictures, U different ones.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mcore_prefix_tree.layout.picture_features import compare_pictures, number_features, read_grids
from mcore_prefix_tree.layout.trainer_rows import HostRows, Int64Array
from mcore_prefix_tree.logprob.restore import expand
from mcore_prefix_tree.utils.upload import upload

# Model types whose language model reads pictures only by embeddings, rotary positions and deepstack rows.
_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "glm4v", "glm46v", "glm4v_moe")
_INPUTS = ("pixel_values", "image_grid_thw")


def has_tower(backbone: Any) -> bool:
    """Return whether a backbone contains more than a text model."""
    return backbone.config.get_text_config() is not backbone.config


def check_tower(backbone: Any) -> None:
    """Raise ValueError, with its name, for a backbone whose pictures cannot be folded."""
    name = type(backbone).__name__
    if (kind := backbone.config.model_type) not in _TYPES:
        raise ValueError(
            f"{name} is more than a text model, of type {kind!r}: folding supports pictures of {', '.join(_TYPES)}, "
            "not videos or sounds"
        )
    if "mm_encoder_outputs" not in inspect.signature(type(backbone).forward).parameters:
        raise ValueError(f"{name} does not take mm_encoder_outputs: folding pictures needs Transformers 5.23 or newer")


def text_positions(backbone: Any, position_ids: torch.Tensor | None) -> torch.Tensor | None:
    """Return the positions by which rows begin and end: with a tower, of ``[3, B, T]`` none, of ``[4, B, T]`` one."""
    if position_ids is None or position_ids.ndim != 3 or len(position_ids) not in (3, 4) or not has_tower(backbone):
        return position_ids
    return position_ids[0] if len(position_ids) == 4 else None


@dataclass(frozen=True, kw_only=True, eq=False)
class Pictures:
    """Pictures of a call, or its positions in three dimensions, on the host.

    ``feature`` is int64 ``[B T]``, a row of the different pictures' features or -1; ``position`` int64 ``[3, B T]``,
    from the first token of each row, or None; ``first`` is int64 ``[U]``, the first picture of each kind.
    """

    feature: Int64Array
    position: Int64Array | None
    first: Int64Array
    grids: Int64Array

    @classmethod
    def read(cls, backbone: Any, call: dict[str, Any], rows: HostRows) -> Pictures | None:
        """Read the pictures of a call, None without any; raise ValueError if they do not fit its rows."""
        grids = read_grids(*(call.get(name) for name in _INPUTS))
        size = grids.prod(1) // backbone.config.vision_config.spatial_merge_size**2
        at = np.flatnonzero(rows.ids == (token := backbone.config.image_token_id)) if len(grids) else _NONE
        if len(at) != size.sum():
            raise ValueError(
                f"the rows have {len(at)} tokens of pictures (id {token}), but image_grid_thw describes {size.sum()}: "
                "pass the pictures of all rows, and cut no picture"
            )
        position = _read_positions(backbone, call, rows)
        if position is None and not len(grids):
            return None
        same, first = compare_pictures(call["pixel_values"], grids) if len(grids) else (_NONE, _NONE)
        feature = np.full(rows.size, -1)
        feature[at] = number_features(size, same, first)
        return cls(feature=feature, position=position, first=first, grids=grids)

    @property
    def repeated(self) -> bool:
        """Return whether two pictures are equal."""
        return len(self.first) < len(self.grids)

    def number_tokens(self, rows: HostRows) -> HostRows:
        """Return rows whose ids, int64 ``[B T]``, are equal only if tokens, pictures, places and positions agree."""
        return rows.compared_by(self.feature, *(() if self.position is None else self.position))

    def inputs(self, backbone: Any, call: dict[str, Any], source: Int64Array) -> dict[str, Any]:
        """Return the arguments of a call for unique tokens; ``source`` ``[P]`` is a token of the rows for each."""
        device = call["input_ids"].device
        inputs: dict[str, Any] = dict.fromkeys(_INPUTS)
        if self.position is not None:
            inputs["position_ids"] = upload(self.position[:, None, source], device)
        if not len(self.grids):
            return inputs
        patches = self.grids.prod(1)
        start = (np.cumsum(patches) - patches).tolist()
        pixels = torch.cat([call["pixel_values"][start[one] : start[one] + patches[one]] for one in self.first])
        grids = upload(self.grids[self.first], call["image_grid_thw"].device)
        output = backbone.get_image_features(pixels, grids, return_dict=True)
        feature = upload(self.feature[source][self.feature[source] >= 0], device)

        def gather(pictures: Any) -> list[torch.Tensor]:
            features = torch.cat(list(pictures))
            assert len(features) == self.feature.max(initial=-1) + 1
            return [expand(features, feature.to(features.device), padded=False)]

        output.pooler_output = gather(output.pooler_output)
        if (layers := getattr(output, "deepstack_features", None)) is not None:
            output.deepstack_features = [gather(layer) for layer in layers]
        return inputs | {"mm_encoder_outputs": {"image": output}}


_NONE = np.zeros(0, dtype=np.int64)


def _read_positions(backbone: Any, call: dict[str, Any], rows: HostRows) -> Int64Array | None:
    """Return positions ``[3, B T]`` from each row's first token, by the caller or the model; None for those of text."""
    positions = call.get("position_ids")
    if positions is None and call.get("image_grid_thw") is not None:
        names = ("input_ids", "attention_mask", "mm_token_type_ids", "image_grid_thw")
        wanted = inspect.signature(backbone.compute_3d_position_ids).parameters.values()
        nothing = {parameter.name: None for parameter in wanted if parameter.default is parameter.empty}
        positions = backbone.compute_3d_position_ids(**nothing | {name: call.get(name) for name in names})
    if positions is None or positions.ndim != 3:
        return None
    size = call["input_ids"].shape
    if positions.shape[1:] not in {size, (1, size[1])}:
        raise ValueError(f"position_ids of shape {list(positions.shape)} do not give the rows of {list(size)}")
    return rows.from_first(positions[-3:].expand(3, *size).flatten(1).cpu().numpy())
