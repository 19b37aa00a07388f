"""Trained weights in the format of the Hugging Face folder that they started from: ``mcore-prefix-tree export``.

The folder that is written has the files of the source: weights of the same names, shapes and types in safetensors files
of the same names, and its configuration and tokenizer.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import cast
from uuid import uuid4

import torch
from megatron.core.utils import get_model_config, unwrap_model

from mcore_prefix_tree.mcore.checkpoints import checkpoint
from mcore_prefix_tree.mcore.loop.session import EndRequest, session
from mcore_prefix_tree.mcore.models.bridge import load_bridge, without_scalar_head
from mcore_prefix_tree.mcore.models.bridge_weights import DTYPES, copies_in, is_untrained
from mcore_prefix_tree.mcore.models.build_gpt import build_chunks
from mcore_prefix_tree.mcore.models.lora import bridge_lora
from mcore_prefix_tree.mcore.ranks import everyone, is_main_rank, on_main_rank
from mcore_prefix_tree.settings import ModelConfig, Recipe, RecipeError, adapter_folder
from mcore_prefix_tree.settings.adapter_folder import PREFIX
from mcore_prefix_tree.settings.command_checks import check_new
from mcore_prefix_tree.settings.hf_folder import CONFIG, INDEX, PICKLES, SCORE, HuggingFaceFolder

# Weights, in formats of other frameworks too, which would be the untrained ones, and tables of other weights.
_OTHER_WEIGHTS = (".gguf", ".h5", ".msgpack", ".onnx", ".ot", ".tflite")
_LEFT_OUT = (".safetensors", ".bin.index.json", ".h5.index.json", *PICKLES, *_OTHER_WEIGHTS)


def make_parent(path: str | Path, setting: str) -> None:
    """Make the parent of a folder that a setting names, before there is anything to write; else raise RecipeError."""
    parent = Path(path).absolute().parent
    try:
        parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecipeError(f"{setting}: {parent} cannot be made: {error.strerror}") from error
    if not os.access(parent, os.W_OK | os.X_OK):
        raise RecipeError(f"{setting}: {parent} is not a folder that can be written to")


def export_model(model: ModelConfig, chunks: Sequence[torch.nn.Module], target: str | Path) -> None:
    """Write the trained part of a recipe's model: its adapter in PEFT's format, or all weights; see :func:`export`."""
    assert model.hf is not None, "the recipe checks it"
    if model.lora is None:
        export(model.hf, chunks, target)
        return
    bridge = load_bridge(model.hf)
    weights = bridge.export_adapter_weights(unwrap_model(list(chunks)), cpu=True, show_progress=False)
    _write_folder(target, weights, lambda folder: _AdapterWriter(model, folder))


def export(source: str, chunks: Sequence[torch.nn.Module], target: str | Path) -> None:
    """Write a model's weights as a Hugging Face folder; all ranks together, all or nothing.

    A model with a scalar head becomes transformers' ``...ForSequenceClassification`` of one label. ``source`` is the
    folder of ``model.hf``; ``chunks`` may be in any wrappers. Raises RecipeError if the source has other weights.
    """
    with without_scalar_head(chunks) as (models, head):
        # Only the last stage has it.
        of_ranks = everyone(None if head is None else cast("torch.Tensor", head.weight).detach().cpu())
        score = next((weight for weight in of_ranks if weight is not None), None)
        folder = HuggingFaceFolder.read(source)
        bridge = load_bridge(source)
        weights: Iterator[tuple[str, torch.Tensor]] = bridge.export_hf_weights(models, cpu=True, show_progress=False)
        if score is not None:
            folder, weights = folder.with_scalar_head(), chain(weights, [(SCORE, score)])
        has_depths = bool(get_model_config(models[0]).mtp_num_layers)
        copies = copies_in(folder, bridge.hf_pretrained.config, has_depths)
        _write_folder(target, weights, lambda unfinished: _Writer(folder, unfinished, copies, has_depths))


def _write_folder(
    target: str | Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    writer_to: Callable[[Path], _Writer | _AdapterWriter],
) -> None:
    """Write a folder that appears once it is complete, from weights of any shapes that all ranks make together."""
    unfinished = Path(f"{Path(target).absolute()}.{everyone(uuid4().hex)[0]}.tmp")
    on_main_rank(unfinished.mkdir)
    writer = writer_to(unfinished)
    failure: Exception | None = None

    def finish() -> None:
        try:
            if failure is not None:
                raise failure
            writer.finish()
            os.rename(unfinished, target)
        except (MemoryError, OSError, ValueError):
            raise
        except Exception as error:  # safetensors has its own exception for a file that it cannot read
            raise RecipeError(f"{target} cannot be exported: {error}") from error

    try:
        # Every rank takes part in every weight; the main rank continues with the others after an error.
        for name, weight in weights:
            if is_main_rank() and failure is None:
                try:
                    writer.add(name, weight)
                except Exception as error:  # of any kind: the other ranks wait for this one
                    failure = error
        on_main_rank(finish)
    except BaseException:
        if is_main_rank():
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


class _AdapterWriter:
    """Writes an adapter as PEFT's ``save_pretrained`` does, into an empty folder."""

    def __init__(self, model: ModelConfig, target: Path) -> None:
        self._model, self._target = model, target
        self._weights: dict[str, torch.Tensor] = {}

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Take a matrix ``[out, in]`` by its PEFT name; raise RecipeError if a value is not finite."""
        if not weight.isfinite().all():
            raise RecipeError(f"'{name}' has values that are not finite")
        self._weights[PREFIX + name] = weight.detach().clone().contiguous()

    def finish(self) -> None:
        from megatron.bridge.models.conversion.peft_bridge import build_adapter_config_dict

        assert self._model.lora is not None
        config = build_adapter_config_dict(
            bridge_lora(self._model.lora),
            target_modules=list(self._model.lora.target_modules),
            base_model_name_or_path=self._model.hf,
        )
        (self._target / adapter_folder.CONFIG).write_text(json.dumps(config, indent=2) + "\n")
        _save(self._weights, self._target / adapter_folder.WEIGHTS)


class _Writer:
    """Writes each file of a folder, with the source's names, shapes and types, as soon as its weights are there."""

    def __init__(self, source: HuggingFaceFolder, target: Path, copies: Mapping[str, str], has_depths: bool) -> None:
        self._source, self._target, self._copies, self._has_depths = source, target, copies, has_depths
        self._left: dict[str, set[str]] = defaultdict(set)
        for name, file in source.files.items():
            self._left[file].add(name)
        self._weights: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)

    def add(self, name: str, weight: torch.Tensor) -> None:
        """Take a text model's weight, and its copies; raise RecipeError unless the source has it, of the same shape."""
        name = self._source.names.get(name, name)
        if name not in self._copies:  # some bridges export a tied output layer, too
            for one in (name, *(copy for copy, own in self._copies.items() if own == name)):
                self._take(one, weight)

    def _take(self, name: str, weight: torch.Tensor) -> None:
        file = self._source.files.get(name)
        if file is None or name not in self._left[file]:
            raise RecipeError(f"Megatron-Bridge exports '{name}', which {self._source.path} does not have, or twice")
        if list(weight.shape) != list(self._source.shapes[name]):
            raise RecipeError(
                f"Megatron-Bridge exports '{name}' of shape {list(weight.shape)}, which in {self._source.path} has "
                f"{list(self._source.shapes[name])}"
            )
        # A copy: the exported tensor may be a view of something larger, or of another weight.
        copied = weight.detach().to(DTYPES[self._source.dtypes[name]], copy=True).contiguous()
        if not copied.isfinite().all():
            what = "beyond that type's largest" if weight.isfinite().all() else "not finite"
            raise RecipeError(
                f"'{name}' has values {what}, and {self._source.path} has it in {self._source.dtypes[name]}; export "
                "to the format of a folder in BF16"
            )
        self._weights[file][name] = copied
        self._left[file].remove(name)
        if not self._left[file]:
            self._write(file)

    def finish(self) -> None:
        """Write weights that the model does not train and the other files; raise RecipeError if a weight is missing."""
        from safetensors import safe_open

        for file in [file for file, names in self._left.items() if names]:
            with safe_open(self._source.path / file, "pt") as opened:
                for name in sorted(self._left[file]):
                    if not is_untrained(self._source, name, self._has_depths):
                        raise RecipeError(f"Megatron-Bridge exports no '{name}', which {self._source.path} has")
                    self._weights[file][name] = opened.get_tensor(name)
            self._write(file)
        for one in sorted(self._source.path.iterdir()):
            if one.is_file() and not one.name.endswith(_LEFT_OUT):
                shutil.copyfile(one, self._target / one.name)
        # A language model that became a classifier.
        if self._source.has_scalar_head and json.loads((self._target / CONFIG).read_text()) != self._source.config:
            (self._target / CONFIG).write_text(json.dumps(self._source.config, indent=2) + "\n")
            if (self._target / INDEX).is_file():
                index = json.loads((self._target / INDEX).read_text()) | {"weight_map": dict(self._source.files)}
                (self._target / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _write(self, file: str) -> None:
        _save(self._weights.pop(file), self._target / file)


def _save(weights: dict[str, torch.Tensor], file: Path) -> None:
    """Write weights of any shapes to a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, file, metadata={"format": "pt"})
    except SafetensorError as error:  # raised for example on a full disk
        raise OSError(errno.EIO, f"cannot be written ({error})", str(file)) from error
    with file.open("rb") as written:
        os.fsync(written.fileno())


def run_export(recipe: Recipe, target: str | Path) -> tuple[int | str, bool]:
    """Write the last checkpoint as a Hugging Face folder; return its iteration, and whether this is the main rank.

    Raises RecipeError if the checkpoint is missing or does not fit, or the folder exists; OSError if it is not written.
    """
    saved = recipe.checkpoint.save
    assert saved is not None, "checked"
    check_new(target, f"PATH={target}")
    make_parent(target, f"PATH={target}")
    with session(recipe) as joined:
        iteration = checkpoint.find_weights(saved, "checkpoint.save")
        model = joined.recipe.model
        assert model.vocab_size is not None, "the folder gives it"
        chunks = build_chunks(
            model,
            joined.config,
            vocab_size=model.vocab_size,
            device=joined.device,
            scalar_head=recipe.objective.has_scalar_head,
        )
        checkpoint.load_weights(saved, iteration, chunks, model=model)
        # It is finished first: a signal would leave half a folder.
        with EndRequest():
            export_model(model, chunks, target)
        return iteration, is_main_rank()
