"""Files of projections: ours in safetensors, and NeMo-RL's of ``torch.save`` for exchange.

Nothing in a file is executed: safetensors holds arrays, and ``torch.load`` reads only tensors and plain values.
"""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mcore_prefix_tree.data.write import whole_file
from mcore_prefix_tree.utils.inputs import damage_as
from mcore_prefix_tree.xtoken.projection import Entries, Projection, from_entries
from mcore_prefix_tree.xtoken.token_bytes import TokenBytes

_FORMAT = "mcore-prefix-tree projection 1"
_KEY = "projection"
_TORCH = (".pt", ".pth")
_REBUILD = "build it again with mcore-prefix-tree xtoken build-projection"
_DAMAGED = f"is damaged or no projection; {_REBUILD}"


def is_torch_file(path: str | Path) -> bool:
    """Return whether a file's name is that of NeMo-RL's format."""
    return str(path).lower().endswith(_TORCH)


def write_projection(
    path: str | Path, projection: Projection, *, student_name: str = "", teacher_name: str = ""
) -> None:
    """Write a projection; the file appears complete or not at all, and has the same bytes each time.

    A name that ends in ``.pt`` or ``.pth`` sets NeMo-RL's format, any other safetensors. The tokenizers' names are
    for people. Raises OSError if the file cannot be written.
    """
    if is_torch_file(path):
        content = _torch_bytes(projection, student_name, teacher_name)
    else:
        from safetensors.numpy import save

        about = {
            "format": _FORMAT,
            "student_hash": projection.student_hash,
            "teacher_hash": projection.teacher_hash,
            "student": student_name,
            "teacher": teacher_name,
        }
        # One entry of metadata, because their order is not fixed.
        metadata = {_KEY: json.dumps(about, sort_keys=True)}
        content = save({"columns": projection.columns, "weights": projection.weights}, metadata=metadata)
    with whole_file(path) as unfinished:
        unfinished.write_bytes(content)


def read_projection(
    path: str | Path, *, student: TokenBytes, teacher: TokenBytes, scale_column: bool = False
) -> Projection:
    """Read a projection of two vocabularies, from NeMo-RL's format (``.pt``, ``.pth``) or safetensors.

    Rows of NeMo-RL's files are sorted, and add up to 1 afterwards. ``scale_column`` keeps the entries of its scale
    trick in the last column, a sixth of each row for an arbitrary token.

    Raises:
        ValueError: the file is damaged, is no projection, or was built for another tokenizer; the message names it.
        OSError: the file cannot be read.
    """
    read = _read_torch if is_torch_file(path) else _read_safetensors
    projection = read(path, student, teacher, scale_column)
    for side, table, found in (
        ("student", student, projection.student_hash),
        ("teacher", teacher, projection.teacher_hash),
    ):
        if found and found != table.hash:
            raise ValueError(
                f"{path}: was built for another {side}'s tokenizer than '{table.name}' (hash {found[:12]} instead of "
                f"{table.hash[:12]}); {_REBUILD}"
            )
    _check(path, projection, student, teacher)
    return projection


def _check(path: str | Path, projection: Projection, student: TokenBytes, teacher: TokenBytes) -> None:
    if projection.student_vocab_size != student.vocab_size:
        raise ValueError(
            f"{path}: has {projection.student_vocab_size} rows, but the student's tokenizer '{student.name}' has "
            f"{student.vocab_size} tokens; {_REBUILD}"
        )
    if int(projection.columns.max(initial=-1)) >= teacher.vocab_size or int(projection.columns.min(initial=0)) < -1:
        row = int(np.argmax((projection.columns >= teacher.vocab_size).any(1) | (projection.columns < -1).any(1)))
        raise ValueError(
            f"{path}: row {row} maps to a token that the teacher's tokenizer '{teacher.name}' of {teacher.vocab_size} "
            f"tokens does not have; {_REBUILD}"
        )


def _read_safetensors(path: str | Path, student: TokenBytes, teacher: TokenBytes, scale_column: bool) -> Projection:
    from safetensors import safe_open

    with damage_as(f"{path}: {_DAMAGED}"), safe_open(str(path), framework="numpy") as file:
        about = dict(json.loads((file.metadata() or {}).get(_KEY, "{}")))
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a mapping
    columns, weights = arrays.get("columns"), arrays.get("weights")
    known = {"format", "student_hash", "teacher_hash"} <= about.keys()
    if not known or about["format"] != _FORMAT or columns is None or weights is None:
        raise ValueError(f"{path}: is a safetensors file, but not a projection of this version; {_REBUILD}")
    is_typed = columns.dtype == np.int32 and weights.dtype == np.float32
    if not is_typed or columns.ndim != 2 or columns.shape != weights.shape or not columns.shape[1]:
        raise ValueError(f"{path}: its arrays are not those of a projection; {_REBUILD}")
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"{path}: has weights that are negative or not finite; {_REBUILD}")
    return Projection(
        columns=columns,
        weights=weights,
        teacher_vocab_size=teacher.vocab_size,
        student_hash=str(about["student_hash"]),
        teacher_hash=str(about["teacher_hash"]),
    )


def _torch_bytes(projection: Projection, student_name: str, teacher_name: str) -> bytes:
    import torch

    content = {
        "indices": torch.from_numpy(projection.columns.astype(np.int64)),
        "likelihoods": torch.from_numpy(projection.weights),
        "student_model_id": student_name,
        "teacher_model_id": teacher_name,
        "enable_scale_trick": False,
        "student_hash": projection.student_hash,
        "teacher_hash": projection.teacher_hash,
    }
    # In a file, the archive's folder would be named after it, which is unfinished and has a temporary name.
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _read_torch(path: str | Path, student: TokenBytes, teacher: TokenBytes, scale_column: bool) -> Projection:
    import torch

    with damage_as(f"{path}: {_DAMAGED}"):
        content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, dict) and {"indices", "likelihoods"} <= content.keys():
        found = _dense_entries(path, content, scale_column)
        top_k, size = int(content["indices"].shape[1]), int(content["indices"].shape[0])
    elif isinstance(content, dict) and content and all(isinstance(key, tuple) and len(key) == 2 for key in content):
        found = _sparse_entries(path, content)
        top_k, size = 0, student.vocab_size
    else:
        raise ValueError(f"{path}: has neither 'indices' and 'likelihoods' nor pairs of tokens; {_REBUILD}")
    rows, columns, weights = found
    strange = (rows < 0) | (rows >= size) | (columns < 0) | (columns >= teacher.vocab_size)
    if strange.any():
        at = int(np.argmax(strange))
        raise ValueError(
            f"{path}: maps token {rows[at]} to {columns[at]}, but the tokenizers '{student.name}' and '{teacher.name}' "
            f"have {size} and {teacher.vocab_size} tokens; {_REBUILD}"
        )
    if not np.isfinite(weights).all() or (weights < 0).any():
        raise ValueError(f"{path}: has weights that are negative or not finite; {_REBUILD}")
    # The sparse form keeps all entries; they are counted once it is known that the rows are tokens.
    read = from_entries(found, (size, teacher.vocab_size), top_k or int(np.bincount(rows).max(initial=1)))
    student_hash, teacher_hash = (str(content.get(name, "")) for name in ("student_hash", "teacher_hash"))
    return replace(read, student_hash=student_hash, teacher_hash=teacher_hash)


def _dense_entries(path: str | Path, content: dict[str, Any], scale_column: bool) -> Entries:
    import torch

    indices, likelihoods = content["indices"], content["likelihoods"]
    for name, tensor in (("indices", indices), ("likelihoods", likelihoods)):
        _check_tensor(path, name, tensor)
    if indices.ndim != 2 or indices.shape != likelihoods.shape or not indices.shape[1]:
        raise ValueError(f"{path}: 'indices' and 'likelihoods' are not matrices of one shape; {_REBUILD}")
    # Weights that were learned are parameters.
    columns = indices.to(torch.int64).numpy()
    weights = likelihoods.detach().to(torch.float64).numpy()
    trick = content.get("enable_scale_trick")
    if not isinstance(trick, bool | int | None):
        raise ValueError(f"{path}: 'enable_scale_trick' is a {type(trick).__name__}, not true or false; {_REBUILD}")
    if trick and not scale_column:
        columns, weights = columns[:, :-1], weights[:, :-1]
    row, rank = np.nonzero((columns >= 0) & (weights != 0))
    return Entries(row, columns[row, rank], weights[row, rank])


def _check_tensor(path: str | Path, name: str, tensor: Any) -> None:
    """Reject a value that is no tensor of numbers with one element per index; raises ValueError that describes it."""
    import torch

    found = None
    if not torch.is_tensor(tensor):
        found = f"is a {type(tensor).__name__} and no tensor"
    elif tensor.is_meta:
        found = "is on the meta device, which holds no values"
    elif tensor.is_quantized:
        found = f"is quantized ({tensor.dtype})"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        found = f"is nested or has the layout {tensor.layout}; call to_dense() before it is saved"
    elif tensor.is_complex() or tensor.dtype is torch.bool or (name == "indices" and tensor.is_floating_point()):
        found = f"has the type {tensor.dtype}"
    if found is not None:
        raise ValueError(f"{path}: '{name}' {found}; {_REBUILD}")


def _sparse_entries(path: str | Path, content: dict[Any, Any]) -> Entries:
    try:
        keys = np.array([*content], dtype=np.int64)
        weights = np.array([float(weight) for weight in content.values()], dtype=np.float64)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last: of a tensor without a value
        raise ValueError(f"{path}: its pairs are not two tokens with a weight; {_REBUILD}") from None
    return Entries(keys[:, 0], keys[:, 1], weights)
