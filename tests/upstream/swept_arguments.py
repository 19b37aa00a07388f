"""Try every argument of a checkout's own parser that reaches its model: is it refused, or is folding exact with it?

``python swept_arguments.py EXAMPLES ANSWERS``: two files of JSON, values of options that have no obvious one, and
the outcome of each case. An argument reaches the model if the ``TransformerConfig`` changes, or the builder's inputs.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import dataclasses
import enum
import inspect
import io
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from built_models import differences, stock_builder
from harness.in_double import AllInDouble, error_of, with_any_weights
from megatron_lm import CPU, FOLDED, TRAIN

from mcore_prefix_tree.cpu.emulation import enable_training, single_process
from mcore_prefix_tree.layout import fold
from mcore_prefix_tree.pretrain_gpt import use_megatron_lm
from mcore_prefix_tree.sample import Sample

SIZES = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64 "
    "--position-embedding-type rope --attention-dropout 0 --hidden-dropout 0 --padded-vocab-size 128 --vocab-size 128"
)
JOB = f"{CPU} --no-bias-gelu-fusion {SIZES} {TRAIN} {FOLDED} --prefix-tree-data-path /dev/null"
# The models whose arguments are tried.
BASES = {
    "dense": JOB,
    "experts": f"{JOB} --swiglu --disable-bias-linear --num-experts 4 --moe-token-dispatcher-type alltoall "
    "--moe-router-load-balancing-type none",
    "latent": f"{JOB} --swiglu --normalization RMSNorm --disable-bias-linear --multi-latent-attention --q-lora-rank 12 "
    "--kv-lora-rank 10 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim 6 --spec latent_spec dense_layer",
}
# Of numbers, the first that Megatron-LM takes and that changes something stands for all.
NUMBERS: dict[Any, list[str]] = {int: ["2", "1", "64", "3", "8", "128"], float: ["0.5", "2", "0.001"]}
# Three samples that share prompts; one is the beginning of another.
SAMPLES = [
    Sample(tokens=[7, 3, 11, 5, 2, 9, 14, 1, 8, 4, 6]),
    Sample(tokens=[7, 3, 11, 5, 2, 9, 13, 12, 10]),
    Sample(tokens=[7, 3, 11, 5, 20, 21, 22, 23]),
    Sample(tokens=[7, 3, 11, 5, 2, 9]),
]


# Messages about folding.
TOLD = {"exact", "exact in fp32", "different", "refused", "broken"}


@dataclasses.dataclass
class Case:
    """An argument with a value, on a model, and its outcome."""

    base: str
    words: list[str]
    outcome: str = "no effect"
    said: str = ""

    @property
    def option(self) -> str:
        """The argument's name."""
        return self.words[0]


class Megatrons(Exception):
    """Megatron-LM itself does not take the arguments."""


def main(examples: Path, answers: Path) -> None:
    warnings.simplefilter("ignore")
    logging.disable()
    use_megatron_lm(None)
    enable_training()
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    given = json.loads(examples.read_text())
    found: list[Case] = []
    with single_process():
        model_parallel_cuda_manual_seed(1)
        sweep = Sweep()
        for action in sweep.parser()._actions:
            base = sweep.base(action.dest)
            if base is not None:
                found += sweep.of_argument(base, cases_of(action, given))
    answers.write_text(json.dumps([dataclasses.asdict(case) | {"option": case.option} for case in found]))


def cases_of(action: argparse.Action, given: dict[str, list[str]]) -> Iterator[list[str]]:
    """Words that set an argument to something else than its default."""
    if not action.option_strings or isinstance(action, argparse._HelpAction):
        return
    option = next((name for name in action.option_strings if name.startswith("--")), action.option_strings[0])
    if option.startswith(("--prefix-tree", "--megatron-lm-path")):
        return
    for value in given.get(option, []):
        yield [option, *value.split()]
    if isinstance(action, argparse.BooleanOptionalAction):
        yield from ([name] for name in action.option_strings)
    elif action.nargs == 0:
        yield [option]
    elif action.choices is not None:
        names = [choice.name if isinstance(choice, enum.Enum) else str(choice) for choice in action.choices]
        yield from ([option, name] for name in names)
    elif action.type in NUMBERS:
        yield from ([option, value] for value in NUMBERS[action.type])
    elif option not in given:
        yield [option, "example"]


class Sweep:
    """Tries arguments on models of the checkout."""

    def __init__(self) -> None:
        from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
        from megatron.training.arguments import core_transformer_config_from_args

        self._build, source = stock_builder()
        self._by_builder = read_of(source)
        self._fields = {field.name for field in dataclasses.fields(TransformerConfig)}
        self._latent = {field.name for field in dataclasses.fields(MLATransformerConfig)} - self._fields
        self._fields |= read_of(inspect.getsource(core_transformer_config_from_args))
        self._plain = {base: self._fingerprint(*self._stock(words.split())) for base, words in BASES.items()}

    def base(self, name: str) -> str | None:
        """The model that an argument is tried on; None for an argument that reaches none."""
        if name in self._latent:
            return "latent"
        if name not in self._fields | self._by_builder:
            return None
        return "experts" if re.search("moe|expert|router", name) else "dense"

    def of_argument(self, base: str, cases: Iterator[list[str]]) -> list[Case]:
        """Outcomes of an argument's values."""
        found: list[Case] = []
        for words in cases:
            is_number = len(words) == 2 and words[1] in chain(*NUMBERS.values())
            if is_number and any(case.outcome in TOLD for case in found):
                break
            found.append(self.tried(Case(base, words)))
        return [case for case in found if case.outcome != "no effect"]

    def parser(self) -> argparse.ArgumentParser:
        """The checkout's own."""
        from megatron.training.arguments import parse_args

        seen: list[argparse.ArgumentParser] = []

        def keep(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            seen.append(parser)
            return self._added(parser)

        sys.argv = ["pretrain_gpt", *JOB.split()]
        parse_args(keep)
        return seen[0]

    def tried(self, case: Case) -> Case:
        """The case, with its outcome."""
        from mcore_prefix_tree.arguments.refusals import ArgumentError
        from mcore_prefix_tree.mcore.megatron_lm.argument_checks import checked_config
        from mcore_prefix_tree.mcore.megatron_lm.providers import tree_model

        for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
            os.environ.pop(name, None)  # of the model before, whose --attention-backend set them
        try:
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                args, config = self._stock([*BASES[case.base].split(), *case.words])
        except Megatrons as error:
            return dataclasses.replace(case, outcome="megatron", said=str(error))
        if self._fingerprint(args, config) == self._plain[case.base]:
            return case
        try:
            ours = copy.deepcopy(args)
            ours.prefix_tree_vocab_size = args.padded_vocab_size  # no tokenizer is built
            checked = checked_config(ours)
            with contextlib.redirect_stdout(io.StringIO()):
                tree = tree_model(ours, checked, pre_process=True, post_process=True, pg_collection=None)
        except (ValueError, NotImplementedError) as error:
            if isinstance(error, ArgumentError) or "prefix-tree" in str(error):
                return dataclasses.replace(case, outcome="refused", said=str(error))
            tree, broken = None, error
        except Exception as error:
            tree, broken = None, error
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                stock = self._model(args, config).double()
            with_any_weights(stock)
        except Exception as error:
            return dataclasses.replace(case, outcome="untried", said=f"{type(error).__name__}: {error}")
        if tree is None:
            return dataclasses.replace(case, outcome="broken", said=f"{type(broken).__name__}: {broken}")
        if told := list(differences(tree, stock)):
            return dataclasses.replace(case, outcome="different", said="; ".join(told))
        tree.double().load_state_dict(stock.state_dict())
        said = ""
        for outcome, context, limit in (
            ("exact", AllInDouble(), 1e-12),
            ("exact in fp32", contextlib.nullcontext(), 2e-6),
        ):
            with context:
                try:
                    expected = run_unfolded(stock)
                except Exception as error:
                    said += f"{type(error).__name__}: {error}; "
                    continue
                try:
                    told = list(inexact(folded(tree), expected, limit))
                except NotImplementedError as error:
                    return dataclasses.replace(case, outcome="refused", said=str(error))
                except Exception as error:
                    return dataclasses.replace(case, outcome="broken", said=f"{type(error).__name__}: {error}")
            if not told:
                return dataclasses.replace(case, outcome=outcome, said=said)
            said += "; ".join(told)
        return dataclasses.replace(case, outcome="different" if told else "untried", said=said)

    def _model(self, args: argparse.Namespace, config: Any) -> torch.nn.Module:
        from megatron.training.global_vars import set_args

        set_args(args)  # gpt_builder of core_v0.16.1 asks for them again
        model: torch.nn.Module = self._build(args, config)
        return model

    def _stock(self, words: list[str]) -> tuple[argparse.Namespace, Any]:
        from megatron.training.arguments import core_transformer_config_from_args, parse_args, validate_args

        sys.argv = ["pretrain_gpt", *words]
        try:
            args = parse_args(self._added)
            validate_args(args, {})
            return args, core_transformer_config_from_args(args)
        except (Exception, SystemExit) as error:
            asked = traceback.extract_tb(error.__traceback__)[-1].line
            raise Megatrons(f"{type(error).__name__}: {error or asked}") from error

    def _added(self, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        from mcore_prefix_tree.arguments.flags import add_argument_group

        return add_argument_group(parser)

    def _fingerprint(self, args: argparse.Namespace, config: Any) -> dict[str, str]:
        fields = {field.name: repr(getattr(config, field.name)) for field in dataclasses.fields(config)}
        fields = {name: re.sub(" at 0x[0-9a-f]+", "", value) for name, value in fields.items()}
        return fields | {f"args.{name}": repr(getattr(args, name, None)) for name in self._by_builder}


def read_of(source: str) -> set[str]:
    """Names of the arguments that code reads."""
    pairs = re.findall(r"""\bargs\.(\w+)|\bargs, ['"](\w+)""", source)
    return {name for pair in pairs for name in pair if name}


Found = tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]


def run_unfolded(model: torch.nn.Module) -> Found:
    """Log-probabilities of each sample by itself, and the gradients of a weighted sum of them."""
    found = []
    for sample in SAMPLES:
        ids = torch.tensor(sample.tokens.tolist())[None]
        logits = model(ids, torch.arange(ids.shape[1])[None], None)[0]
        found.append(torch.log_softmax(logits.double(), dim=-1)[:-1].gather(1, ids[0, 1:, None])[:, 0])
    return _with_gradients(model, found)


def folded(model: torch.nn.Module) -> Found:
    """The same of their tree."""
    from mcore_prefix_tree.logprob.restore import restore
    from mcore_prefix_tree.mcore.engine.forward_step import tree_forward
    from mcore_prefix_tree.mcore.outputs import Logprobs
    from mcore_prefix_tree.mcore.seam.micro_batch import MicroBatch

    layout = fold(SAMPLES, padded_size=fold(SAMPLES).physical_tokens + 3)
    batch, readout = MicroBatch.from_layout(layout, attention_backend="reference"), Logprobs()
    logprobs, _ = readout.read(tree_forward(model, batch, readout), batch)
    return _with_gradients(model, [row[1:] for row in restore(logprobs, layout)])


def _with_gradients(model: torch.nn.Module, logprobs: list[torch.Tensor]) -> Found:
    total = sum((row * torch.linspace(1, 2, len(row), dtype=row.dtype)).sum() for row in logprobs)
    assert isinstance(total, torch.Tensor)
    model.zero_grad()
    total.backward()
    return [row.detach() for row in logprobs], {
        name: None if weight.grad is None else weight.grad.clone() for name, weight in model.named_parameters()
    }


def inexact(actual: Found, expected: Found, limit: float) -> Iterator[str]:
    """Results that differ from unfolded samples by more than rounding in fp64."""
    for index, (row, wanted) in enumerate(zip(actual[0], expected[0], strict=True)):
        error = float((row - wanted).abs().max())
        if not error < limit:
            yield f"log-probabilities of sample {index}: {error:.1e}"
    for name, gradient in expected[1].items():
        found = actual[1][name]
        if (found is None) != (gradient is None):
            yield f"gradient of {name}: {found is not None}, not {gradient is not None}"
        elif gradient is not None and found is not None:
            error = error_of(found, gradient)
            if not error < limit:
                yield f"gradient of {name}: {error:.1e}"


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
