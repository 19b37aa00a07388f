"""The order of DESIGN.md section 2, kept by reading every import statement of the package."""

from __future__ import annotations

import ast
import sys
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from harness.commands import SLOW_PACKAGES, run_process

import mcore_prefix_tree

PACKAGE = "mcore_prefix_tree"
ROOT = Path(__file__).parents[2] / PACKAGE
FILES = sorted(ROOT.rglob("*.py"))

# Each room, and the rooms it may import. Data flows down this list: a room never imports one below it.
ALLOWED = {
    "cpu": set(),
    "utils": set(),
    "signals": set(),
    "sample": {"signals"},
    "trie": {"sample", "signals", "utils"},
    "data": {"sample", "signals", "trie", "utils"},
    "layout": {"sample", "trie"},
    "plan": {"layout", "sample", "trie", "utils"},
    "metadata": {"layout", "utils"},
    "attention": {"metadata", "utils"},
    "logprob": {"layout", "utils"},
    "xtoken": {"data", "layout", "logprob", "sample", "signals", "trie", "utils"},
    "objectives": {"layout", "logprob", "sample", "signals", "trie", "utils", "xtoken"},
    "settings": {"attention", "data", "layout", "objectives", "plan", "sample", "signals", "trie", "utils", "xtoken"},
    "arguments": {"attention", "data", "objectives", "plan", "settings", "utils"},
    "mcore": {
        "arguments", "attention", "cpu", "data", "layout", "logprob", "metadata", "objectives", "plan", "sample",
        "settings", "signals", "trie", "utils", "xtoken",
    },
    "integrations": {"attention", "layout", "logprob", "mcore", "metadata", "plan", "sample", "trie", "utils"},
    "bench": {"attention", "layout", "mcore", "metadata", "plan", "sample", "settings", "utils"},
    "pretrain_gpt": {"arguments", "mcore", "utils"},
    "pretrain_hybrid": {"pretrain_gpt"},
    "train_rl": {"pretrain_gpt"},
    "__init__": {"layout", "logprob", "metadata", "plan", "sample", "signals"},
}  # fmt: skip
ALLOWED["cli"] = set(ALLOWED) - {"__init__"}
ALLOWED["__main__"] = {"cli"}

# The rooms of mcore/ in the same way.
IN_MCORE: dict[str, set[str]] = {
    "release": set(),
    "ranks": set(),
    "seam": {"release"},
}
ORDER = ["seam", "outputs", "engine", "models", "checkpoints", "teachers", "loop"]
for number, room in enumerate(ORDER[1:], start=1):
    IN_MCORE[room] = {"release", "ranks", *ORDER[:number]}
IN_MCORE["packed"] = IN_MCORE["engine"] | {"engine"}
IN_MCORE["megatron_lm"] = IN_MCORE["loop"] | {"packed"}
IN_MCORE["__init__"] = IN_MCORE["packed"] | {"packed"}

MAY_IMPORT_MEGATRON = {"mcore", "cpu", "pretrain_gpt"}
# Of the integrations, those whose library runs on Megatron-Core.
ON_MEGATRON = [ROOT / "integrations" / name for name in ("verl", "slime.py", "nemo_rl.py", "megatron_bridge.py")]
# Names that the package itself exports.
PUBLIC = set(mcore_prefix_tree.__all__)
# Modules of the attention room in addition to its back-ends, each of which is a file or a folder.
ATTENTION_ENTRANCES = {"__init__", "api", "auto"}
SHARED_BY_BACKENDS = {"backend_options", "capability", "tile_blocks", "spans", "padding", "parity"}


def room_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def module_of(file: Path) -> str:
    parts = [PACKAGE, *file.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def imports_of(file: Path) -> list[str]:
    """Full names of everything a file imports, anywhere in it; ``from a import b`` counts as ``a.b``."""
    found = []
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide the order"
            found += [f"{node.module}.{alias.name}" for alias in node.names]
    return found


def test_imports_point_one_way():
    unknown = sorted({room_of(file) for file in FILES} - set(ALLOWED))
    assert not unknown, f"new rooms {unknown}: list in ALLOWED the imports that each may have"
    offenders = []
    for file in FILES:
        room = room_of(file)
        for name in imports_of(file):
            package, _, rest = name.partition(".")
            other = rest.partition(".")[0]
            if package != PACKAGE:
                continue
            if other in PUBLIC:
                offenders.append(f"{module_of(file)}: import {name} from the module that defines it")
            elif other != room and other not in ALLOWED[room]:
                offenders.append(f"{module_of(file)}: {room} must not import {name}")
    assert not offenders, "\n".join(offenders)


def test_the_rooms_of_mcore_import_downwards():
    offenders = []
    for file in (ROOT / "mcore").rglob("*.py"):
        room = file.relative_to(ROOT / "mcore").parts[0].removesuffix(".py")
        for name in imports_of(file):
            _, inside, rest = name.partition(f"{PACKAGE}.mcore.")
            other = rest.partition(".")[0]
            if inside and other != room and other not in IN_MCORE[room]:
                offenders.append(f"{module_of(file)}: {room} must not import {name}")
    assert not offenders, "\n".join(offenders)


def test_engine_does_not_branch_on_the_kind_of_objective():
    """Readouts and step hooks follow from the output that an objective names; a table has a row for each."""
    questions = {"has_scalar_head", "second_models"}
    offenders = []
    for file in [*(ROOT / "mcore" / "seam").glob("*.py"), *(ROOT / "mcore" / "engine").glob("*.py")]:
        asked = {node.attr for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Attribute)}
        offenders += [f"{module_of(file)} asks {name}" for name in sorted(asked & questions)]
        offenders += [f"{module_of(file)} imports {name}" for name in imports_of(file) if ".xtoken" in name]
    assert not offenders, "\n".join(offenders)


def test_the_order_has_no_cycle():
    TopologicalSorter(ALLOWED).prepare()


def test_no_files_import_each_other_in_a_circle():
    """At their top: imports in functions and under TYPE_CHECKING wait."""
    names = {module_of(file) for file in FILES}
    graph = {}
    for file in FILES:
        top = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ImportFrom)]
        found = {f"{node.module}.{one.name}" for node in top for one in node.names}
        # A room's entrance imports its files, which do not import it back.
        graph[module_of(file)] = {name if name in names else name.rpartition(".")[0] for name in found} & names
    for name, others in graph.items():
        others.discard(name)
    TopologicalSorter(graph).prepare()


def test_only_the_seam_imports_megatron():
    offenders = []
    for file in FILES:
        heavy = {name for name in imports_of(file) if name.split(".")[0] in {"megatron", "transformer_engine", "apex"}}
        if room_of(file) == "integrations":
            heavy |= {name for name in imports_of(file) if name.startswith(f"{PACKAGE}.mcore")}
        if heavy and room_of(file) not in MAY_IMPORT_MEGATRON and not {file, *file.parents} & {*ON_MEGATRON}:
            offenders.append(f"{module_of(file)} imports {', '.join(sorted(heavy))}")
    assert not offenders, "\n".join(offenders)


def attention_part(file: Path) -> str:
    return file.relative_to(ROOT / "attention").parts[0].removesuffix(".py")


BACKENDS = [
    file
    for file in sorted((ROOT / "attention").rglob("*.py"))
    if attention_part(file) not in ATTENTION_ENTRANCES | SHARED_BY_BACKENDS
]


# FlashAttention-4 has no deterministic backward on Hopper: it takes Triton's.
BORROWED = {"fa4": {"triton_tree"}}


def test_attention_back_ends_do_not_import_each_other():
    assert {"path", "reference"} <= {attention_part(file) for file in BACKENDS}
    offenders = []
    for file in BACKENDS:
        for name in imports_of(file):
            package, _, rest = name.partition(f"{PACKAGE}.attention.")
            allowed = SHARED_BY_BACKENDS | {attention_part(file)} | BORROWED.get(attention_part(file), set())
            if not package and rest and rest.split(".")[0] not in allowed:
                offenders.append(f"{module_of(file)} imports {name}")
    assert not offenders, "\n".join(offenders)


def loaded_by(statement: str) -> set[str]:
    """Top-level packages that are loaded in a fresh interpreter after a statement."""
    script = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    result = run_process([sys.executable, "-c", script], cwd=ROOT.parent, code=0)
    return set(result.stdout.split())


def test_the_attention_room_loads_no_kernels():
    assert loaded_by(f"import {PACKAGE}.attention").isdisjoint({"triton", "flash_attn", "transformer_engine"})


def test_nothing_left_of_the_seam_loads_megatron():
    rooms = ["metadata", "attention", "logprob", "objectives", "data", "plan"]
    script = (
        "import importlib, sys\n"
        "for room in sys.argv[1:]:\n"
        f"    importlib.import_module('{PACKAGE}.' + room)\n"
        "    assert not {'megatron', 'transformer_engine'} & sys.modules.keys(), room\n"
    )
    run_process([sys.executable, "-c", script, *rooms], cwd=ROOT.parent, code=0)


# Trainers are stand-ins: some are not installed, and others load a GPU's packages.
DOORS = """
import importlib, sys
from importlib.machinery import ModuleSpec

class AnyName(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

class Anything(metaclass=AnyName):
    def __init__(self, *args, **kwargs): ...
    def __call__(self, wrapped):
        return wrapped

class Trainers:
    names = ("verl", "slime", "nemo_rl", "ray", "tensordict", "transfer_queue", "megatron.bridge", "megatron.training")
    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{trainer}.") for trainer in self.names):
            return ModuleSpec(name, self, is_package=True)
    def create_module(self, spec): ...
    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Anything, name)

def check(door):
    above = sorted(name for name in sys.modules if ".".join(name.split(".")[:2]) in sys.argv[2:])
    assert not above, f"{door} loads {above}"

sys.meta_path.insert(0, Trainers())
for door in sys.argv[1].split():
    importlib.import_module(door)
    check(door)

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.transformer_config import TransformerConfig
from mcore_prefix_tree.mcore import fold_inside, single_process

with single_process():
    sizes = dict(num_layers=2, hidden_size=8, num_attention_heads=2, use_cpu_initialization=True)
    config = TransformerConfig(**sizes, hidden_dropout=0.0, attention_dropout=0.0)
    model = GPTModel(config, get_gpt_layer_local_spec(), 32, 16, position_embedding_type="rope")
    model = fold_inside(model, attention_backend="reference", check_first=True, max_tokens=4)
    ids, ends = torch.tensor([[1, 2, 3, 4, 1, 2, 3, 5]]), torch.tensor([0, 4, 8], dtype=torch.int32)
    rows = PackedSeqParams("thd", cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=4, max_seqlen_kv=4)
    model(ids, None, None, packed_seq_params=rows, labels=ids).sum().backward()
    assert model.folding.last.unique_tokens == 5
check("a folded step")
"""


def test_trainers_load_only_the_core():
    """Neither the doors of trainers nor a step of a model that folds inside load recipes, their data or objectives."""
    names = ["transformers", "trl", "prefix_grouper", "automodel", "verl.engine", "verl.trainers", "slime", "nemo_rl"]
    doors = [f"{PACKAGE}.integrations.{name}" for name in [*names, "megatron_bridge"]]
    rooms = ["data", "settings", "cli", "arguments", "bench", "objectives", "xtoken"]
    rooms = [f"{PACKAGE}.{room}" for room in rooms]
    command = [sys.executable, "-W", "ignore", "-c", DOORS, " ".join([*doors, f"{PACKAGE}.mcore"]), *rooms]
    run_process(command, cwd=ROOT.parent, code=0)


def test_the_command_line_loads_nothing_heavy_for_its_help():
    loaded = loaded_by(f"import {PACKAGE}.cli.main")
    assert "typer" in loaded
    assert loaded.isdisjoint({*SLOW_PACKAGES, "numpy", "pydantic", "omegaconf", "pyarrow"})
