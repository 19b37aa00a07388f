"""Compare ``tree_model`` with the model that the checkout's own builder makes of the same command line.

``python built_models.py CASES ANSWERS``: two files of JSON, a list of lists of words, and for each the differences.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from mcore_prefix_tree.cpu.emulation import enable_training, single_process
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

SET_FOR_FOLDING = ("variable_seq_lengths", "moe_token_dispatcher_type")
PLAIN = (bool, int, float, str, tuple, list, torch.dtype, type(None))


def main(cases: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    use_megatron_lm(None)
    enable_training()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args
    from megatron.training.global_vars import set_args

    from mcore_prefix_tree.arguments.flags import add_argument_group
    from mcore_prefix_tree.mcore.megatron_lm.argument_checks import checked_config
    from mcore_prefix_tree.mcore.megatron_lm.providers import tree_model

    build, _ = stock_builder()
    told: list[Any] = []
    with single_process():
        model_parallel_cuda_manual_seed(1)
        for words in json.loads(cases.read_text()):
            sys.argv = ["pretrain_gpt", *words]
            args = parse_args(add_argument_group)
            validate_args(args, {})
            args.prefix_tree_vocab_size = args.vocab_size  # no tokenizer is built here
            config = checked_config(args)
            tree = tree_model(args, config, pre_process=True, post_process=True, pg_collection=None)
            set_args(args)  # gpt_builder of core_v0.16.1 asks for them again
            told.append(list(differences(tree, build(args, core_transformer_config_from_args(args)))))
    answers.write_text(json.dumps(told))


def stock_builder() -> tuple[Callable[[Any, Any], Any], str]:
    """How the checkout's scripts build their models, and the code that reads the arguments for it."""
    try:
        from megatron.training.argument_utils import gpt_config_from_args
    except ImportError:
        from gpt_builders import gpt_builder

        return lambda args, config: gpt_builder(args, True, True, config=config), inspect.getsource(gpt_builder)

    from megatron.training.argument_utils import hybrid_config_from_args

    def build(args: Any, config: Any) -> Any:
        config_from_args = gpt_config_from_args if args.hybrid_layer_pattern is None else hybrid_config_from_args
        model_config = config_from_args(args, config)
        return model_config.get_builder_cls()(model_config).build_model(None, pre_process=True, post_process=True)

    return build, inspect.getsource(gpt_config_from_args) + inspect.getsource(hybrid_config_from_args)


def differences(tree: torch.nn.Module, stock: torch.nn.Module) -> Iterator[str]:
    """Differences, except for the classes that this package derives from the stock model's."""
    modules, wanted = named(tree), dict(stock.named_modules())
    if modules.keys() != wanted.keys():
        yield f"modules: {modules.keys() ^ wanted.keys()}"
        return
    for name, module in wanted.items():
        if not isinstance(modules[name], type(module)):
            yield f"{name}: {type(modules[name])} is no {type(module)}"
        for attribute, value in plain(module).items():
            found = getattr(modules[name], attribute)
            if found != value:
                yield f"{name}.{attribute}: {found!r}, not {value!r}"
    shapes = [{name: tuple(value.shape) for name, value in model.named_parameters()} for model in (tree, stock)]
    if shapes[0] != shapes[1]:
        yield f"parameters: {shapes}"
    for field in dataclasses.fields(stock.config):
        ours, theirs = (getattr(model.config, field.name) for model in (tree, stock))
        if field.name not in SET_FOR_FOLDING and isinstance(theirs, PLAIN) and ours != theirs:
            yield f"config.{field.name}: {ours!r}, not {theirs!r}"


def named(tree: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules of a model, with those that one of ours wraps in its place."""
    from mcore_prefix_tree.mcore.seam.latent_attention import PathRotaryEmbedding

    modules = dict(tree.named_modules())
    wrappers = [name for name, module in modules.items() if isinstance(module, PathRotaryEmbedding)]
    for name in wrappers:
        modules[name] = modules.pop(f"{name}.base")
    return modules


def plain(module: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, PLAIN) and name != "training"}


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
