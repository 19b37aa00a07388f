"""``auto``: its back-end, its reported reason, and that it chooses once."""

from __future__ import annotations

import logging
import re
from types import SimpleNamespace

import pytest
import torch
from attention_cases import case_of
from fake_flash_attention import install
from harness.oracles import metadata_of, random_forest

from mcore_prefix_tree import Sample
from mcore_prefix_tree.attention import BACKENDS, auto, check_backend, fa4, parity, triton_tree
from mcore_prefix_tree.attention.api import check_setting
from mcore_prefix_tree.attention.auto import PREFERENCE, TreeShape, choose, cost_table
from mcore_prefix_tree.cpu.emulation import cpu_emulation
from mcore_prefix_tree.mcore.engine.backend import attention_case as case_of_config
from mcore_prefix_tree.mcore.engine.backend import resolve_backend

SHARED = TreeShape(tokens=1000, segments=10, pairs=100_000, depth=1)


def row(name, *, device="cpu", dtype="float32", head_dim=64, deterministic=False, shape=SHARED, **seconds):
    return {
        "device": device,
        "machine": "a test",
        "dtype": dtype,
        "head_dim": head_dim,
        "deterministic": deterministic,
        "name": name,
        "shape": vars(shape),
        "seconds": seconds,
    }


@pytest.fixture
def table(monkeypatch):
    rows = []
    monkeypatch.setattr(auto, "cost_table", lambda: rows)
    return rows


def cpu(**changes):
    return case_of(**({"dtype": torch.float32} | changes))


def test_the_nearest_shape_decides(table):
    few_long = TreeShape(tokens=10_000, segments=10, pairs=30_000_000, depth=1)
    many_short = TreeShape(tokens=10_000, segments=1000, pairs=8_000_000, depth=1)
    table += [row("few", shape=few_long, path=1.0, cascade=2.0), row("many", shape=many_short, path=2.0, cascade=1.0)]
    assert choose(cpu(), TreeShape(tokens=20_000, segments=16, pairs=50_000_000, depth=1)).backend == "path"
    choice = choose(cpu(), TreeShape(tokens=5_000, segments=400, pairs=4_000_000, depth=1))
    assert choice.backend == "cascade"
    assert "(many: cascade 1e+03 ms, path 2e+03 ms)" in choice.reason


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"device": "NVIDIA H200"}])
def test_other_dtypes_and_devices_do_not_count(table, other):
    table.append(row("other", **other, path=2.0, cascade=1.0))
    choice = choose(cpu(), SHARED)
    assert choice.backend == "path"
    assert "not yet measured" in choice.reason


HEADS = [row("narrow", head_dim=32, path=1.0, cascade=2.0), row("wide", head_dim=256, path=2.0, cascade=1.0)]


@pytest.mark.parametrize(
    ("rows", "changes", "backend"),
    [
        (HEADS, {"head_dim": 48}, "path"),
        (HEADS, {"head_dim": 192}, "cascade"),
        ([row("any", path=1.0, cascade=2.0)], {}, "path"),
        # SDPA has no sinks, so path is out however fast it is.
        ([row("any", path=1.0, cascade=2.0)], {"sinks": torch.zeros(4)}, "cascade"),
    ],
)
def test_the_nearest_head_dim_and_supported_back_ends_decide(table, rows, changes, backend):
    table += rows
    assert choose(cpu(**changes), SHARED).backend == backend


@pytest.fixture
def triton_runs(monkeypatch):
    """The kernels of ``triton`` support everything and are right, on fake GPUs."""
    for name in ("refusal", "check"):
        monkeypatch.setattr(auto.load_backend("triton"), name, lambda case: None)


def test_a_measured_gpu_is_used_and_another_is_reported(table, triton_runs):
    table.append(row("any", device="NVIDIA H200", dtype="bfloat16", triton=2.0, flex=1.0))
    case = case_of(device="cuda", capability=(9, 0), dtype=torch.bfloat16)
    assert choose(case, SHARED, device_name="NVIDIA H200").backend == "flex"
    choice = choose(case, SHARED, device_name="NVIDIA H100")
    assert choice.backend == "triton"
    assert "NVIDIA H100" in choice.reason
    assert "not yet measured" in choice.reason


def test_the_mode_of_the_run_decides_which_measurements_count(table, triton_runs, monkeypatch):
    """On a GPU a back-end may have two backwards. The faster one does not count for a run that may not use it."""
    monkeypatch.setattr(fa4, "_is_installed", lambda: True)
    monkeypatch.setattr(fa4, "import_fault", lambda module: None)
    monkeypatch.setattr(fa4, "check", lambda case: None)
    table += [
        row("any", device="NVIDIA H200", dtype="bfloat16", deterministic=True, triton=3.0, flex=2.0),
        row("any", device="NVIDIA H200", dtype="bfloat16", triton=1.5, flex=2.0, fa4=1.0),
    ]

    def chosen(deterministic, device="NVIDIA H200"):
        case = case_of(device="cuda", capability=(9, 0), dtype=torch.bfloat16, deterministic=deterministic)
        return choose(case, SHARED, device_name=device).backend

    assert chosen(True) == "flex"
    assert chosen(True, "unmeasured") == "fa4"
    assert chosen(False) == "fa4"
    monkeypatch.setattr(fa4, "_is_installed", lambda: False)
    assert chosen(False) == "triton"


def test_unsupported_run_error_gives_the_reasons(table):
    with pytest.raises(
        ValueError, match=r"'auto' finds none that supports this run \(path: window=5.*name 'reference'"
    ):
        choose(cpu(window=5), SHARED)


def test_validation_uses_the_back_end_of_training(table):
    """A forward without gradients must not choose a back-end that cannot train: both are asked for the same case."""
    assert choose(cpu(needs_grad=False), SHARED) == choose(cpu(), SHARED)


def test_the_setting():
    check_setting("auto")
    check_setting("path")
    with pytest.raises(ValueError, match="'nope' does not exist"):
        check_setting("nope")
    with pytest.raises(ValueError, match="'auto' does not exist"):
        check_backend("auto")  # a micro-batch names a back-end


def test_the_committed_table_is_of_back_ends():
    rows = cost_table()
    assert rows
    for one in rows:
        assert set(one["seconds"]) <= set(BACKENDS)
        assert len(one["seconds"]) > 1
        assert TreeShape(**one["shape"]).tokens > 0


# Shapes.


def test_the_shape_of_a_forest():
    # A trunk of 10 with three children: two branches of pairs, one rectangle.
    shape = TreeShape.of([metadata_of([10, 3, 4, 5], [-1, 0, 0, 0])])
    assert shape == TreeShape(tokens=22, segments=4, pairs=55 + 3 * 10 + 6 + 4 * 10 + 10 + 5 * 10 + 15, depth=1)


def test_the_shape_of_several_forests_is_their_sum():
    forests = [metadata_of(*random_forest(seed)) for seed in range(3)]
    together, alone = TreeShape.of(forests), [TreeShape.of([forest]) for forest in forests]
    assert together.tokens == sum(one.tokens for one in alone)
    assert together.depth == max(one.depth for one in alone)
    with pytest.raises(ValueError, match="empty forest"):
        TreeShape.of([])


# The job.


def config(**changes):
    fields = {
        "num_layers": 2,
        "num_attention_heads": 8,
        "num_query_groups": 2,
        "kv_channels": 16,
        "multi_latent_attention": False,
        "tensor_model_parallel_size": 1,
        "params_dtype": torch.float32,
        "softmax_scale": None,
        "softmax_type": "vanilla",
        "window_size": None,
        "window_attn_skip_freq": None,
        "deterministic_mode": False,
    }
    return SimpleNamespace(**fields | changes)


STEP = [Sample(tokens=[*range(20), *range(100 * index, 100 * index + 5)]) for index in range(1, 6)]


def test_choice_is_reported_once_per_job(caplog):
    said = []
    device = torch.device("cpu")
    name = resolve_backend("auto", config(), lambda: STEP, device=device, say=said.append)
    assert name in PREFERENCE["cpu"]
    assert len(said) == 1
    assert said[0].startswith(f"attention backend {name}: ")
    with caplog.at_level(logging.INFO, logger="mcore_prefix_tree"):
        assert resolve_backend("auto", config(), lambda: STEP, device=device) == name
    assert [record.getMessage() for record in caplog.records] == said


def test_a_named_back_end_is_kept_and_asks_for_no_samples():
    def no_samples():
        raise AssertionError

    assert resolve_backend("reference", config(), no_samples, device=torch.device("cpu")) == "reference"


def test_a_named_back_end_that_cannot_is_refused_before_the_first_step():
    with pytest.raises(ValueError, match="attention backend 'flex' does not support training with device=cpu"):
        resolve_backend("flex", config(), lambda: STEP, device=torch.device("cpu"))


@pytest.fixture
def hopper(monkeypatch):
    """A GPU, as far as choosing a back-end asks about it, with FlashAttention-4."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(fa4, "_is_installed", lambda: True)
    monkeypatch.setattr(fa4, "import_fault", lambda module: None)
    return torch.device("cuda")


def test_a_deterministic_job_is_told_what_to_give_up_for_a_backend(hopper, monkeypatch):
    """FlashAttention-4 without Triton trains in any order only: refused with the setting that admits it."""
    model = config(params_dtype=torch.bfloat16, kv_channels=64)
    assert resolve_backend("fa4", model, lambda: STEP, device=hopper, deterministic=True) == "fa4"
    monkeypatch.setattr(triton_tree, "has_triton", lambda: False)
    refused = r"'fa4' does not support deterministic=True.* needs the package triton.*; backends that do: .*reference"
    with pytest.raises(ValueError, match=rf"{refused}.*; 'fa4' itself runs with deterministic_attention=false$"):
        resolve_backend("fa4", model, lambda: STEP, device=hopper, deterministic=True)
    assert resolve_backend("fa4", model, lambda: STEP, device=hopper) == "fa4"


def test_a_refusal_for_another_reason_does_not_blame_determinism(hopper):
    model = config(params_dtype=torch.float32, kv_channels=64)
    with pytest.raises(ValueError, match=r"'fa4' does not support dtype=torch\.float32") as raised:
        resolve_backend("fa4", model, lambda: STEP, device=hopper)
    assert "deterministic" not in str(raised.value)


# FlashAttention-4 through the front door: a package on the path, a GPU as torch describes it.


@pytest.fixture
def gpu(tmp_path, monkeypatch, table):
    """Starts a job on a GPU with flash-attn-4 answered by the CPU. Returns its back-end, its messages, the calls.

    ``table`` has no time of ``triton``, whose kernels would be compiled for the fake GPU.
    """
    monkeypatch.syspath_prepend(tmp_path)
    install(tmp_path)
    monkeypatch.setattr(fa4, "_FAULTS", {})
    fa4._is_installed.cache_clear()
    fa4._visible.cache_clear()
    import flash_attn.cute as package

    def start(capability, *, error=0.0, seconds=None, **settings):
        package.error = error
        parity._check.cache_clear()
        for deterministic in (True, False):
            given = seconds or {"fa4": 1.0, "flex": 2.0}
            table.append(row("any", device="NVIDIA", dtype="bfloat16", deterministic=deterministic, **given))
        model = config(params_dtype=torch.bfloat16, kv_channels=64)
        said = []
        with cpu_emulation(force=True), monkeypatch.context() as patched:
            patched.setattr(torch.cuda, "is_available", lambda: True)
            patched.setattr(torch.cuda, "is_initialized", lambda: False)  # no stream is captured
            patched.setattr(torch.cuda, "get_device_capability", lambda device: capability)
            patched.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA")
            patched.setattr(torch.Tensor, "pin_memory", lambda self: self)
            name = resolve_backend(
                "auto", model, lambda: STEP, device=torch.device("cuda"), say=said.append, **settings
            )
        return name, said[0], package.calls

    yield start
    install(tmp_path)  # its modules are forgotten
    for cached in (fa4._is_installed, fa4._visible, parity._check):
        cached.cache_clear()


def test_auto_takes_fa4_on_hopper_in_any_order(gpu):
    name, said, calls = gpu((9, 0))
    assert (name, calls[0]["deterministic"]) == ("fa4", False)
    assert "(any: fa4 1e+03 ms, flex 2e+03 ms); its gradients may add up in any order" in said


def test_auto_takes_fa4_on_blackwell_in_order(gpu):
    """Its backward there is given the order in which blocks of keys add to dQ."""
    name, said, calls = gpu((10, 0), deterministic=True)
    assert said.endswith("; deterministic")
    assert (name, calls[0]["deterministic"]) == ("fa4", True)
    lists = calls[0]["backward"]
    assert lists.dq_write_order.shape == lists.mask_block_idx.shape
    assert lists.dq_write_order_full.shape == lists.full_block_idx.shape
    assert lists.spt is False


@pytest.mark.parametrize(
    ("capability", "settings"),
    [
        pytest.param((9, 0), {"deterministic": True}, id="deterministic on Hopper without Triton"),
        pytest.param((8, 0), {}, id="Ampere"),
        pytest.param((9, 0), {"seconds": {"fa4": 2.0, "flex": 1.0}}, id="measured slower"),
    ],
)
def test_auto_passes_fa4_by(gpu, capability, settings, monkeypatch):
    monkeypatch.setattr(triton_tree, "has_triton", lambda: False)
    name, said, calls = gpu(capability, **settings)
    assert (name, calls) == ("flex", [])
    assert "skipped" not in said


def test_auto_excludes_a_wrong_kernel(gpu):
    name, said, calls = gpu((9, 0), error=0.1)
    assert name == "flex"
    assert calls
    assert "skipped: attention backend 'fa4' is wrong on this machine: out is off by" in said


def test_a_call_too_large_for_a_kernel_of_another_project_is_refused(gpu, monkeypatch):
    monkeypatch.setattr(parity, "MOST_NUMBERS", 1024)
    name, said, calls = gpu((9, 0))
    assert (name, calls) == ("flex", [])
    assert re.search(
        r"flash-attn-4 takes at most \d tokens of \d+ heads of 64 numbers, and a micro-batch has \d+", said
    )
    assert "lower batch.max_tokens, or take attention_backend=triton" in said


def test_unmeasured_auto_prefers_installed_fa4(gpu):
    name, said, _ = gpu((9, 0), seconds={"reference": 1.0})
    assert name == "fa4"
    assert "first in order of preference" in said


@pytest.mark.parametrize("variable", [None, "0"])
def test_a_jobs_own_determinism_makes_attention_deterministic(hopper, variable, monkeypatch):
    """Megatron's mode, or TransformerEngine's variable."""
    monkeypatch.setattr(triton_tree, "has_triton", lambda: False)
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")
    sizes = {"params_dtype": torch.bfloat16, "kv_channels": 64}
    assert resolve_backend("fa4", config(**sizes), lambda: STEP, device=hopper) == "fa4"
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", variable or "1")
    model = config(deterministic_mode=variable is None, **sizes)
    assert case_of_config(model, device=torch.device("cpu")).options.deterministic
    with pytest.raises(ValueError, match="'fa4' does not support deterministic=True"):
        resolve_backend("fa4", model, lambda: STEP, device=hopper)


LATENT = {"multi_latent_attention": True, "qk_head_dim": 128, "qk_pos_emb_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("changes", "sizes"), [({"tensor_model_parallel_size": 4}, (2, 1, 16, 16)), (LATENT, (8, 8, 192, 128))]
)
def test_heads_are_those_of_a_tensor_parallel_rank_and_of_latent_attention(changes, sizes):
    case = case_of_config(config(**changes), device=torch.device("cpu"))
    assert (case.heads, case.kv_heads, case.head_dim, case.value_dim) == sizes
    assert case.options.softmax_scale == sizes[2] ** -0.5
    assert case.needs_grad
