"""Megatron-LM's ``pretrain`` and its model builders, in the forms that they have had, behind one call each.

Up to core_v0.17 ``pretrain`` parses the command line itself, with the arguments of ``extra_args_provider``. Since
core_v0.18 its caller parses, and passes the arguments as a ``PretrainConfigContainer``; a model may still come from a
provider function instead of a ``ModelConfig``. A ``ModelConfig`` takes the layers; before there was one, builders took
them as ``--spec``. Upstream names its functions alike for each kind of model: ``gpt_builder`` and ``hybrid_builder``,
``gpt_config_from_args`` and ``hybrid_config_from_args``.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from megatron import training
from megatron.core.enums import ModelType
from megatron.core.transformer.spec_utils import import_module
from megatron.training import get_args, pretrain
from megatron.training import training as loop
from megatron.training.arguments import parse_args

from mcore_prefix_tree.arguments.refusals import ArgumentError
from mcore_prefix_tree.mcore import release
from mcore_prefix_tree.mcore.engine.known_shapes import LateGroups, LoopCommunicator, LoopSteps
from mcore_prefix_tree.mcore.megatron_lm.command_line import add_prefix_tree_args
from mcore_prefix_tree.mcore.release import HAS_HYBRID_MODEL
from mcore_prefix_tree.mcore.seam.hybrid_layers import NEEDS_NEWER, check_pattern
from mcore_prefix_tree.plan.model_shape import has_experts

_SHARED = {"train_valid_test_dataset_provider", "model_provider", "model_type", "forward_step_func"}
_PARSES = {"args_defaults", "extra_args_provider"}
_CONTAINER = "cfg_container"
_LAYERS = "mcore_prefix_tree_layers"


def checkout() -> Path:
    """Return the folder of the imported Megatron-LM."""
    return Path(str(training.__file__)).resolve().parents[2]


def check_megatron_lm() -> None:
    """Check that the checkout's ``pretrain`` has a known form; raise ArgumentError for another."""
    parameters = set(inspect.signature(pretrain).parameters)
    if not (parameters >= _SHARED and (parameters >= _PARSES or _CONTAINER in parameters)):
        raise ArgumentError(
            f"{checkout()} is Megatron-LM {release.installed_version()}, whose pretrain() takes other arguments than "
            f"those that --prefix-tree calls; check out core_v0.16.1, core_v0.19.0 or main at {release.MAIN_COMMIT}"
        )


def run_pretrain(
    datasets_provider: Callable[..., Any] | None,
    model_provider: Callable[..., Any],
    forward_step: Callable[..., Any],
    *,
    add_arguments: Callable[..., Any] = add_prefix_tree_args,
    steps: LoopSteps | None = None,
) -> None:
    """Train, with the arguments of the command line and of ``--prefix-tree``.

    ``add_arguments`` is Megatron's ``extra_args_provider``, and receives the script's defaults too: none. Without
    ``steps`` of the loop, and before core_v0.19, pipeline stages exchange shapes, and run no pass before a step.
    """
    communicator = None
    if steps is not None and inspect.signature(pretrain).parameters.keys() >= {"p2p_communicator", "pg_collection"}:
        communicator, add_arguments = LoopCommunicator(steps), partial(add_arguments, runs_ahead=True)
    settings = parsing = _parsing(add_arguments)
    if _parses_first():
        from megatron.training.argument_utils import pretrain_cfg_container_from_args
        from megatron.training.arguments import parse_and_validate_args

        args = parse_and_validate_args(**parsing)
        with warnings.catch_warnings():
            # It recommends a ModelConfig, which this package makes when Megatron asks for the model.
            warnings.simplefilter("ignore")
            settings = {_CONTAINER: pretrain_cfg_container_from_args(args)}
        if communicator is not None and get_args().pipeline_model_parallel_size > 1:
            settings |= {"p2p_communicator": communicator, "pg_collection": LateGroups()}
            model_provider = partial(_joined, model_provider, communicator)
    elif {"-h", "--help"} & set(sys.argv[1:]):
        # pretrain() first parses for its fault tolerance, without the arguments of --prefix-tree.
        parse_args(parsing["extra_args_provider"])
    pretrain(
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
        **settings,
    )


def _joined(model_provider: Callable[..., Any], communicator: LoopCommunicator, *args: Any, **kwargs: Any) -> Any:
    """Return the provider's model; Megatron builds all chunks between its process groups and its first step."""
    model = model_provider(*args, **kwargs)
    communicator.join(model)
    return model


def start() -> argparse.Namespace:
    """Join the job of the command line, without a model or data, to score; return the validated arguments."""
    parsing = _parsing(partial(add_prefix_tree_args, scores=True))
    if _parses_first():
        from megatron.training.arguments import parse_and_validate_args

        parse_and_validate_args(**parsing)
        parsing = {}
    loop.initialize_megatron(**parsing)
    args: argparse.Namespace = get_args()
    return args


def build_chunks(model_provider: Callable[..., Any]) -> list[Any]:
    """Return this rank's model chunks in the precision of the arguments, without gradients' buffers."""
    chunks: list[Any] = loop.get_model(model_provider, ModelType.encoder_or_decoder, wrap_with_ddp=False)
    return chunks


def _parsing(add_arguments: Callable[..., Any]) -> dict[str, Any]:
    return {"args_defaults": {}, "extra_args_provider": partial(add_arguments, args_defaults={})}


def _parses_first() -> bool:
    """Return whether the command line is parsed before Megatron is called."""
    return _CONTAINER in inspect.signature(pretrain).parameters


def build_model(args: argparse.Namespace, config: Any, exchange: Callable[[Any], Any], **stage: Any) -> Any:
    """Build a pipeline stage's model as the checkout's script does, from other layers.

    It is a ``HybridModel`` if the arguments have a pattern of its layers, as in ``pretrain_hybrid.py``; else a
    ``GPTModel``, as in ``pretrain_gpt.py``. All arguments that describe a model reach the checkout's own builder;
    ``exchange`` maps the layer, block or stack spec that they select to the one to build; ``stage`` has
    ``pre_process``, ``post_process``, ``vp_stage`` and ``pg_collection``, as Megatron gives them to a model provider.
    """
    if importlib.util.find_spec("megatron.training.models") is not None:
        make = _gpt_config if hybrid_pattern(args) is None else _hybrid_config
        model_config = make(args, config, exchange)
        return model_config.get_builder_cls()(model_config).build_model(**stage)
    # The layers get a name to import them by: builders take it as --spec, and layers in no other way.
    module: Any = ModuleType(_LAYERS)
    module.layers = exchange(_selected_spec(args, config, stage["vp_stage"]))
    sys.modules[_LAYERS] = module
    try:
        args = argparse.Namespace(**vars(args) | {"spec": (_LAYERS, "layers")})
        return _builder("gpt" if hybrid_pattern(args) is None else "hybrid")(args, config=config, **stage)
    finally:
        del sys.modules[_LAYERS]


def _hybrid_config(args: argparse.Namespace, config: Any, exchange: Callable[[Any], Any]) -> Any:
    """Return Megatron's ``HybridModelConfig``; without ``--spec`` its builder takes the layers of TransformerEngine."""
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.training.argument_utils import hybrid_config_from_args

    model_config = hybrid_config_from_args(args, config)
    model_config.hybrid_stack_spec = exchange(model_config.hybrid_stack_spec or hybrid_stack_spec)
    return model_config


def _gpt_config(args: argparse.Namespace, config: Any, exchange: Callable[[Any], Any]) -> Any:
    """Return Megatron's ``GPTModelConfig``, whose ``transformer_layer_spec`` may be a function."""
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models.gpt import default_layer_spec

    model_config = gpt_config_from_args(args, config)
    given = model_config.transformer_layer_spec

    def layers(model_config: Any, vp_stage: int | None = None) -> Any:
        return exchange(default_layer_spec(model_config, vp_stage) if given is None else given)

    model_config.transformer_layer_spec = layers
    return model_config


def _builder(kind: str) -> Callable[..., Any]:
    """Return the ``gpt_builder`` or ``hybrid_builder`` that lies next to ``megatron`` in a checkout."""
    file = checkout() / f"{kind}_builders.py"
    if not file.is_file():
        raise ArgumentError(
            f"{file} is missing, with which Megatron-LM {release.installed_version()} builds its model: put a complete "
            "checkout of Megatron-LM on PYTHONPATH"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None, "a file of Python"  # noqa: PT018
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    builder: Callable[..., Any] = getattr(module, f"{kind}_builder")
    return builder


def _selected_spec(args: argparse.Namespace, config: Any, vp_stage: int | None) -> Any:
    """Return the builder's default layers, not offered separately; reject arguments that it would ignore."""
    from mcore_prefix_tree.mcore.seam.layer_specs import stock_block_spec

    use_te = args.transformer_impl == "transformer_engine"
    if args.spec is not None:
        return import_module(args.spec)
    if hybrid_pattern(args) is not None:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec  # this builder has no layers by itself: those that its ModelConfig takes later
    if args.heterogeneous_layers_config_path is not None:
        from megatron.core.models.gpt.heterogeneous.heterogeneous_layer_specs import get_gpt_heterogeneous_layer_spec

        return get_gpt_heterogeneous_layer_spec(config, use_te)
    if config.qk_l2_norm and not use_te and config.num_moe_experts is None:
        raise ArgumentError(
            "--qk-l2-norm with --transformer-impl local: this Megatron-LM builds a model without experts as if it were "
            "not set; remove it, or use --transformer-impl transformer_engine"
        )
    return stock_block_spec(config, use_transformer_engine=use_te, vp_stage=vp_stage)


def hybrid_pattern(args: argparse.Namespace) -> str | None:
    """Return the pattern of a ``HybridModel``'s layers, None for a GPT."""
    pattern: str | None = getattr(args, "hybrid_layer_pattern", None)
    # Megatron's validation renames an argument of the older name.
    return getattr(args, "hybrid_override_pattern", None) if pattern is None else pattern


def check_layers(args: argparse.Namespace) -> None:
    """Reject a pattern that cannot be trained; the arguments may be validated by Megatron-LM or not yet."""
    pattern = hybrid_pattern(args)
    if pattern is None:
        return
    if not HAS_HYBRID_MODEL:
        raise ValueError(f"--hybrid-override-pattern: {NEEDS_NEWER}; check out core_v0.19.0")
    check_pattern(pattern)
    if has_experts(pattern) and args.num_experts is None:
        raise ValueError(f"--hybrid-layer-pattern {pattern} has layers of experts, E, but no --num-experts")
