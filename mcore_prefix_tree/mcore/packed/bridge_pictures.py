"""Megatron-Bridge's Qwen3-VL and Qwen3.5-VL, whose language model folds the rows of a call with their pictures.

The model puts the embeddings of pictures into the packed rows, as ever. Torch's forward hooks compare the pictures of a
call by their pixels, give its tower those that differ, and number their tokens for its language model.
"""

from __future__ import annotations

import sys
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mcore_prefix_tree.layout.picture_features import compare_pictures, number_features, read_grids
from mcore_prefix_tree.layout.trainer_rows import Int64Array
from mcore_prefix_tree.mcore.seam.all_tokens import count_splits, gather_tokens, split_tokens
from mcore_prefix_tree.utils.upload import upload

if TYPE_CHECKING:
    from mcore_prefix_tree.mcore.packed.packed_rows import FoldedRows

_ROOM = "megatron.bridge.models.qwen_vl.modelling_qwen3_vl"


def is_with_tower(model: Any) -> bool:
    """Return whether a model is Megatron-Bridge's Qwen3-VL or Qwen3.5-VL, with its tower."""
    return _is(model, "model", "Qwen3VLModel")


def takes_deepstack(model: Any) -> bool:
    """Return whether a model is the language model of one, whose first layers add features of pictures."""
    return _is(model, "text_model", "Qwen3VLGPTModel")


def _is(model: Any, module: str, name: str) -> bool:
    # Nobody has such a model before Megatron-Bridge's module is imported, which takes seconds.
    kind: Any = getattr(sys.modules.get(f"{_ROOM}.{module}"), name, None)
    return kind is not None and isinstance(model, kind)


def number_pictures(model: Any) -> None:
    """Compare the pictures of each call: the tower runs each once, and the language model gets their numbers."""
    pictures = _Pictures()
    model.register_forward_pre_hook(pictures.read, with_kwargs=True)
    if model.vision_model is not None:
        model.vision_model.register_forward_pre_hook(pictures.take_different, with_kwargs=True)
        model.vision_model.register_forward_hook(pictures.repeat)
    number = partial(_number_tokens, model.image_token_id)
    model.language_model.register_forward_pre_hook(number, with_kwargs=True, prepend=True)


class _Pictures:
    """The pictures of a call, N of them, U different ones, from the call to the end of its tower."""

    first: Int64Array  # [U], the first picture of each kind
    grids: Int64Array  # [N, 3]
    features: Int64Array  # a number for each token of all pictures, which counts the features of the different ones

    def read(
        self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Compare the pictures of a call, as torch's forward pre-hook of the model."""
        params = kwargs.get("packed_seq_params")
        self.grids = np.zeros((0, 3), dtype=np.int64)
        if params is None:
            return None  # its language model refuses rows that are not packed
        if kwargs.get("pixel_values_videos") is not None:
            raise NotImplementedError(
                "folding inside the model does not support pixel_values_videos: pass pictures only"
            )
        pixels, grids = kwargs.get("pixel_values"), kwargs.get("image_grid_thw")
        if pixels is None and grids is not None:
            raise ValueError(
                "image_grid_thw has no pixel_values: every pipeline stage compares pictures; pass both to all"
            )
        self.grids = read_grids(pixels, grids)
        self.features = self.first = np.zeros(0, dtype=np.int64)
        if pixels is not None:
            same, self.first = compare_pictures(pixels, self.grids)
            self.features = number_features(self.grids.prod(1) // model.square_merge_size, same, self.first)
        return args, kwargs | {"packed_seq_params": with_own(params, picture_features=self.features)}

    def take_different(self, tower: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replace patches ``[patches, size]`` and grids by those of different pictures, as a pre-hook of the tower."""
        if not len(self.grids):
            return None
        parts = kwargs["hidden_states"].split(self.grids.prod(1).tolist())
        grids = kwargs["grid_thw"]
        different = {
            "hidden_states": torch.cat([parts[at] for at in self.first]),
            "grid_thw": grids.index_select(0, upload(self.first, grids.device)),
        }
        return args, kwargs | different

    def repeat(self, tower: Any, args: tuple[Any, ...], output: Any) -> Any:
        """Return the features of every picture, as a hook of the tower."""
        if not len(self.grids):
            return None
        features, deep = output
        at = upload(self.features, features.device)
        return features.index_select(0, at), [layer.index_select(0, at) for layer in deep]


def _number_tokens(
    token: int, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Number the tokens of pictures, as torch's forward pre-hook; raise ValueError if a picture has none."""
    params = kwargs.get("packed_seq_params")
    features = getattr(params, "picture_features", None)
    if features is None:
        return args, kwargs
    ids = kwargs["input_ids"].flatten()
    at = (ids == token).nonzero().flatten().cpu()
    if len(at) != len(features):
        raise ValueError(
            f"the rows have {len(at)} tokens of pictures (id {token}), but image_grid_thw describes "
            f"{len(features)}: pass pixel_values and image_grid_thw of all rows, on every pipeline stage"
        )
    numbers = torch.full((len(ids),), -1)
    numbers[at] = torch.from_numpy(features)
    return args, kwargs | {"packed_seq_params": with_own(params, picture_tokens=numbers)}


def with_own(params: Any, **own: Any) -> Any:
    """Return a copy of packed rows' parameters, of whichever class, with further attributes."""
    found = copy(params)
    vars(found).update(own)
    return found


def take_deepstack(model: Any, rows: FoldedRows, call: dict[str, Any]) -> dict[str, Any]:
    """Return what the first layers add to unique tokens of pictures."""
    layers = call.get("deepstack_visual_embeds")
    if not layers:
        return {}
    source, numbers = rows.sources_in(rows.layout), call["packed_seq_params"].picture_tokens.cpu().numpy()
    at = upload(source, layers[0].device)
    given = call["visual_pos_masks"].flatten()
    parts = upload(numbers[source] >= 0, layers[0].device).chunk(count_splits(model))
    taken = parts[model.tp_group.rank() if len(parts) > 1 else 0]

    def take(features: torch.Tensor) -> torch.Tensor:
        """Return the rows of this rank's unique tokens; under sequence parallelism they may be another rank's."""
        every = features.new_zeros(len(given), 1, features.shape[-1]).index_put((given,), features.unsqueeze(1))
        return split_tokens(gather_tokens(every, model).index_select(0, at), model)[taken].squeeze(1)

    return {"visual_pos_masks": taken.unsqueeze(0), "deepstack_visual_embeds": [take(one) for one in layers]}
