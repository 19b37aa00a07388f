"""FlashAttention-4 without a GPU: rejected cases, and kernels that take our lists and compile."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from attention_cases import case_of
from fake_flash_attention import install
from harness.commands import run_process
from harness.oracles import metadata_of, random_forest

from mcore_prefix_tree.attention import fa4, triton_tree
from mcore_prefix_tree.attention.tile_blocks import block_plan

HOPPER = {"device": "cuda", "capability": (9, 0), "dtype": torch.bfloat16, "deterministic": False}
BLACKWELL = HOPPER | {"capability": (10, 0)}


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(fa4, "_is_installed", lambda: True)
    monkeypatch.setattr(fa4, "import_fault", lambda module: None)


LATENT = {"head_dim": 192, "value_dim": 128}


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ({}, r"^device=cpu \(it is a CUDA kernel\)"),
        (HOPPER | {"capability": (8, 0)}, r"^a GPU of compute capability 8.0 \(Hopper and Blackwell only\)"),
        (HOPPER | {"capability": (12, 0)}, r"^a GPU of compute capability 12.0"),
        (HOPPER | {"dtype": torch.float32}, "^dtype=torch.float32"),
        (HOPPER | {"head_dim": 100}, r"^head_dim=100 with values of 100 \(multiples of 8\)"),
        (HOPPER | {"head_dim": 264}, "^head_dim=264 .*at most 256"),
        (BLACKWELL | {"head_dim": 192}, "^head_dim=192 with values of 192 .*at most 128"),
        (BLACKWELL | {"head_dim": 256, "value_dim": 128}, "^head_dim=256 with values of 128 .*or 192 with 128, or 256"),
    ],
)
def test_refusals_name_the_argument(case, says, installed):
    assert re.search(says, fa4.refusal(case_of(**case)))


@pytest.mark.parametrize(
    "case",
    [
        HOPPER,
        HOPPER | {"deterministic": True},
        HOPPER | LATENT,
        HOPPER | LATENT | {"kv_heads": 4},
        HOPPER | {"head_dim": 256, "window": 5, "sinks": torch.zeros(4)},
        BLACKWELL | LATENT,
        BLACKWELL | {"deterministic": True},
        BLACKWELL | {"head_dim": 256},
    ],
)
def test_supported_cases_are_accepted(case, installed):
    assert fa4.refusal(case_of(**case)) is None


@pytest.mark.parametrize(
    ("case", "borrows"),
    [
        (HOPPER | {"deterministic": True}, True),
        (HOPPER | LATENT, True),
        (BLACKWELL | {"head_dim": 256}, True),
        (HOPPER, False),
        (HOPPER | LATENT | {"kv_heads": 4}, False),
        (BLACKWELL | LATENT | {"deterministic": True}, False),
    ],
)
def test_only_training_with_tritons_backward_needs_triton(case, borrows, installed, monkeypatch):
    monkeypatch.setattr(triton_tree, "has_triton", lambda: False)
    reason = fa4.refusal(case_of(**case))
    says = r"^deterministic=.*: its backward there is that of 'triton', which does not support .*package triton, 3.4"
    assert re.search(says, reason) if borrows else reason is None
    assert fa4.refusal(case_of(**case | {"needs_grad": False})) is None


@pytest.fixture
def broken(tmp_path, monkeypatch):
    """A flash-attn-4 whose libraries are not on the path."""
    install(tmp_path)
    shutil.rmtree(tmp_path / "cutlass")
    (tmp_path / "flash_attn" / "cute" / "__init__.py").write_text("import cutlass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(fa4, "_FAULTS", {})
    fa4._is_installed.cache_clear()
    yield
    install(tmp_path)  # its modules are forgotten
    fa4._is_installed.cache_clear()


@pytest.mark.skipif(fa4._is_installed(), reason="flash-attn-4 is installed, and with it cutlass")
@pytest.mark.usefixtures("broken")
def test_a_package_that_is_installed_but_does_not_import():
    says = r"^device=cuda with a flash-attn-4 that does not import \(ModuleNotFoundError: No module named 'cutlass'\)"
    assert fa4._is_installed()
    for _ in range(2):
        assert re.search(says, fa4.refusal(case_of(**HOPPER)))


# Stands in for the calls that the package makes to a GPU.
ON_HOPPER = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}
ON_BLACKWELL = {"FLASH_ATTENTION_ARCH": "sm_100", "CUTE_DSL_ARCH": "sm_100a", "FLASH_ATTENTION_NUM_SMS": "148"}


def compiles(*arguments, target=ON_HOPPER):
    """Run the gate in a separate process: the package reads its target from the environment, once."""
    gate = Path(__file__).with_name("fa4_compile_gate.py")
    return run_process([sys.executable, str(gate), *arguments], env=target)


needs_package = pytest.mark.skipif(not fa4._is_installed(), reason="flash-attn-4 is not installed")
# heads, key heads, D, W: every row of tiles_of
OF_HOPPER = ["4,4,64,64", "8,2,64,64", "8,2,96,96", "8,2,128,128", "4,4,192,128", "8,2,192,192", "8,2,256,256"]
OF_BLACKWELL = ["4,4,64,64", "8,2,64,64", "8,2,96,96", "8,2,128,128", "4,4,192,128", "8,2,192,128"]
# A forward for triton's backward returns its log-sum-exps.
FORWARDS = [*((ON_HOPPER, dims) for dims in ("8,2,64,64", "8,2,128,128", "8,2,192,128")), (ON_BLACKWELL, "8,2,256,256")]
COMPILED = [
    *((ON_HOPPER, [dims], "forward backward") for dims in OF_HOPPER),
    *((ON_BLACKWELL, [dims], "forward backward") for dims in OF_BLACKWELL),
    *((ON_BLACKWELL, [dims, "ordered"], "forward backward") for dims in ("8,2,64,64", "8,2,128,128", "4,4,192,128")),
    *(
        (one, ["8,2,128,128", name], "forward backward")
        for one in (ON_HOPPER, ON_BLACKWELL)
        for name in ("window", "sinks")
    ),
    *((one, [dims, name], "forward") for one, dims in FORWARDS for name in ("forward", "forward,window,sinks")),
]


@needs_package
@pytest.mark.parametrize(("target", "arguments", "printed"), COMPILED)
def test_kernels_compile(target, arguments, printed):
    result = compiles(*arguments, target=target)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == printed.split()


@needs_package
@pytest.mark.parametrize(
    ("target", "arguments", "says"),
    [
        pytest.param(ON_HOPPER, ["8,2,128,128", "ordered"], "", id="why no order is asked of Hopper"),
        pytest.param(
            *(ON_BLACKWELL, ["8,2,256,256"], "head_dim=256 does not support block sparsity"),
            id="why a head dim of 256 borrows its backward on Blackwell",
        ),
    ],
)
def test_backwards_that_do_not_compile(target, arguments, says):
    result = compiles(*arguments, target=target)
    assert result.returncode != 0
    assert says in result.stderr
    assert result.stdout.split() == ["forward"]


@needs_package
@pytest.mark.parametrize(("option", "reads"), [("forward", 1), ("forward,window", 2)])
def test_blackwell_reads_the_mask_by_words(option, reads, tmp_path):
    """Four keys a load, for two copies of a tile's 128 keys: one for the last tile, which may be cut off."""
    keep = {"CUTE_DSL_KEEP": "ptx", "CUTE_DSL_DUMP_DIR": str(tmp_path)}
    result = compiles("8,2,128,128", option, target=ON_BLACKWELL | keep)
    assert result.returncode == 0, result.stderr[-2000:]
    (code,) = (file.read_text() for file in tmp_path.glob("*fwd_sm100*.ptx"))
    assert code.count("ld.global.v4.b32") == reads * 2 * 128 // 4
    assert code.count("ld.global.b32") < 128


class Pointer:
    """A place in a tensor, for the package's language."""

    def __init__(self, tensor, place=0):
        self.tensor, self.place = tensor, place
        self.iterator = self

    def __add__(self, places):
        assert places % 32 == 0  # the alignment that the load relies on
        return Pointer(self.tensor, self.place + places)

    def __getitem__(self, place):
        return int(self.tensor[place])


@pytest.fixture
def language(tmp_path, monkeypatch):
    """The parts of the package's language that the mask is written in, as Python."""
    install(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    cutlass.Uint32, cutlass.max, cutlass.range_constexpr = int, max, range
    cute.assume = lambda value, divby: value
    cute.make_tensor = lambda pointer, size: SimpleNamespace(
        load=lambda: pointer.tensor[pointer.place : pointer.place + size].tolist()
    )
    utils.shr_u32 = lambda value, places: value >> places
    fa4._visible.cache_clear()
    yield
    install(tmp_path)  # its modules are forgotten
    fa4._visible.cache_clear()


class Index(tuple):
    """Indices of a row or of keys, which the package passes as a vector."""

    __slots__ = ()
    shape = property(lambda self: (len(self),))


@pytest.mark.usefixtures("language")
@pytest.mark.parametrize("window", [None, 70])
def test_words_of_the_mask_are_its_bits(window):
    metadata = metadata_of(*random_forest(1, nodes=14, node_lens=(1, 60, 130)), padding=3)
    end, position = (
        torch.nn.functional.pad(one, (0, 256)) for one in (metadata.subtree_end, metadata.tree_position_ids)
    )
    mask, size = fa4._visible(window, words=True), metadata.padded_size
    assert mask.__vec_size__ == 32
    key = torch.arange(size)
    for row in range(0, size, 3):
        seen = (key <= row) & (row < end[:size])
        if window is not None:
            seen &= position[row] - position[:size] < window
        for first in range(0, size, 32):
            # Past the last key, the kernel counts them from zero, and masks what it gets.
            keys = Index(place % size for place in range(first, first + 32))
            word = mask(0, 0, Index([row] * 32), keys, None, (Pointer(end), Pointer(position)))
            bits = [word >> bit & 1 for bit in range(32)][: size - first]
            assert bits == seen[first : first + 32].int().tolist()
        wrapped = mask(0, 0, Index([row] * 32), Index(range(5, 37)), None, (Pointer(end), Pointer(position)))
        assert 0 <= wrapped < 1 << 32


@pytest.mark.parametrize("window", [None, 70])
def test_key_blocks_add_to_a_query_block_one_after_the_other(window):
    """By their numbers, which is the order in which they are launched: none waits for one behind it."""
    metadata = metadata_of(*random_forest(1, nodes=14, node_lens=(1, 60, 130, 200)), padding=3)
    by_key = block_plan(metadata, 128, 128, window=window).by_key
    lists = [by_key.padded(full=full) for full in (False, True)]
    adds = {}
    for (counts, blocks), ranks in zip(lists, fa4.write_order(lists), strict=True):
        assert ranks.shape == blocks.shape
        for key, count in enumerate(counts):
            for query, rank in zip(blocks[key, :count], ranks[key, :count], strict=True):
                adds.setdefault(int(query), []).append((key, int(rank)))
    assert max(len(keys) for keys in adds.values()) > 3
    for keys in adds.values():
        assert [rank for _, rank in sorted(keys)] == list(range(len(keys)))


@needs_package
@pytest.mark.parametrize("target", [ON_HOPPER, ON_BLACKWELL], ids=["hopper", "blackwell"])
def test_the_gate_can_fail(target):
    """Lists for other tiles than its own are refused by the package."""
    result = compiles("8,2,128,128", "wrong-tiles", target=target)
    assert result.returncode != 0
    assert "Block" in result.stderr
    assert "forward" not in result.stdout
