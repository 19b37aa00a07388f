"""PEFT's adapter folders, and which layers of a Hugging Face folder an adapter fits.

Only JSON and the header of a safetensors file are read here; nothing that a folder holds is executed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from mcore_prefix_tree.settings.hf_folder import PICKLES, HuggingFaceFolder, keep_until_changed, read_json, tensors_in
from mcore_prefix_tree.settings.model_section import LoraConfig, LoraTarget

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# PEFT's prefix of the names of a model's layers, and its suffix.
PREFIX, A, B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"
# Keys of a configuration that an adapter's function does not depend on, or that are read separately.
_ASIDE = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "init_lora_weights",
    "lora_alpha",
    "lora_dropout",
    "megatron_core",
    "peft_type",
    "peft_version",
    "qalora_group_size",
    "r",
    "revision",
    "target_modules",
    "task_type",
}
_NEUTRAL: tuple[Any, ...] = (None, False, "none", {}, [])


@dataclass(frozen=True, kw_only=True)
class AdapterFolder:
    """A folder that PEFT's ``save_pretrained`` wrote."""

    path: Path
    lora: LoraConfig  # rank, scale and layers of the adapter
    # Shape of each matrix, by the name of its layer's weight in the model's folder and A or B.
    shapes: Mapping[str, Sequence[int]]

    @staticmethod
    def read(path: str | Path) -> AdapterFolder:
        """Read a folder's configuration and the header of its weights, unless they are unchanged since the last call.

        Raises:
            ValueError: the folder is missing, incomplete or truncated, holds pickles, or its adapter is of another kind
                than low-rank matrices on linear layers; names the file.
            OSError: a file cannot be read.
        """
        return _read_folder(path)

    def check_fits(self, model: HuggingFaceFolder) -> None:
        """Raise ValueError, which names the matrix, unless both matrices of each layer have the model's shapes."""
        wanted: dict[str, list[int]] = {}
        for layer in layers_with(model, self.lora):
            rows, columns = model.shapes[f"{layer}.weight"]
            wanted |= {layer + A: [self.lora.r, columns], layer + B: [rows, self.lora.r]}
        for name in sorted(wanted.keys() | self.shapes.keys()):
            has, needs = self.shapes.get(name), wanted.get(name)
            if has is None or needs is None or list(has) != needs:
                raise ValueError(
                    f"{self.path / WEIGHTS} has '{PREFIX}{name}' of shape {has}, and {model.path} needs {needs}; give "
                    "an adapter of this model"
                )


@keep_until_changed
def _read_folder(folder: Path) -> AdapterFolder:
    if not (folder / CONFIG).is_file():
        raise ValueError(f"{folder} is not a folder with an {CONFIG}; give the local folder that PEFT wrote")
    config = read_json(folder / CONFIG)
    _check(folder / CONFIG, config)
    pickles = sorted(one.name for one in folder.iterdir() if one.suffix in PICKLES)
    if pickles and not (folder / WEIGHTS).is_file():
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle, which can run code when it is opened; write it "
            "again with save_pretrained(safe_serialization=True)"
        )
    shapes = {}
    for name, (_, shape) in tensors_in(folder / WEIGHTS).items():
        if not name.startswith(PREFIX) or not name.endswith((A, B)):
            raise ValueError(f"{folder / WEIGHTS} has '{name}', which is not a matrix of LoRA")
        shapes[name.removeprefix(PREFIX)] = shape
    lora = LoraConfig(r=config["r"], lora_alpha=config["lora_alpha"], target_modules=sorted(config["target_modules"]))
    return AdapterFolder(path=folder, lora=lora, shapes=shapes)


def layers_with(model: HuggingFaceFolder, lora: LoraConfig) -> list[str]:
    """Return the names of the layers that get an adapter; raises ValueError that names a target that is not one."""
    found = []
    for target in lora.target_modules:
        layers = [name.removesuffix(".weight") for name in model.files if name.endswith(f".{target}.weight")]
        plain = [name for name in layers if re.fullmatch(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+", name)]
        if not layers:
            raise ValueError(f"{model.path} has no layer '{target}'; remove it from model.lora.target_modules")
        if layers != plain:
            other = next(name for name in layers if name not in plain)
            raise ValueError(
                f"{model.path} has '{other}': adapters of experts are not supported; remove '{target}' from "
                "model.lora.target_modules"
            )
        found += plain
    return found


def with_adapter(content: dict[Any, Any], model: dict[Any, Any], path: str) -> tuple[dict[Any, Any], list[str]]:
    """Return a recipe's content with the settings of ``model.adapter``, and the contradictions; raises as ``read``."""
    lora, options = AdapterFolder.read(path).lora, model.get("lora") or {}
    if not isinstance(options, dict):
        return content, []
    decided = {"r": lora.r, "lora_alpha": lora.lora_alpha, "target_modules": lora.target_modules}
    faults = [
        f"model.lora.{key}={options[key]}, but {Path(path) / CONFIG} has {value}; unset it"
        for key, value in decided.items()
        if options.get(key, value) != value
    ]
    return {**content, "model": model | {"lora": options | decided}}, faults


def _check(file: Path, config: Mapping[str, Any]) -> None:
    if config.get("peft_type") != "LORA":
        raise ValueError(f"{file} has peft_type={config.get('peft_type')}; adapters are LORA")
    if not isinstance(config.get("init_lora_weights", True), bool) and config["init_lora_weights"] != "gaussian":
        raise ValueError(
            f"{file} has init_lora_weights={config['init_lora_weights']}, with which PEFT changes the weights of the "
            "model; convert the adapter with PEFT first"
        )
    for key, value in config.items():
        if key not in _ASIDE and value not in _NEUTRAL:
            raise ValueError(f"{file} has {key}={value}, which adapters here do not compute")
    for key in ("r", "lora_alpha"):
        if type(config.get(key)) is not int or config[key] < 1:
            raise ValueError(f"{file} has {key}={config.get(key)}; expected a positive integer")
    targets, known = config.get("target_modules"), get_args(LoraTarget)
    if not isinstance(targets, list) or not targets or not set(map(str, targets)) <= set(known):
        raise ValueError(f"{file} has target_modules={targets}; expected a list of {', '.join(known)}")
