"""Parallel layouts by name: how many processes, and how they are cut."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pytest

from harness.worlds import Layout

LAYOUTS = {
    "single": (1, Layout()),
    "tp2": (2, Layout(tp=2)),
    "tp2-sp": (2, Layout(tp=2, sequence_parallel=True)),
    "pp2": (2, Layout(pp=2)),
    "pp2-vpp2": (2, Layout(pp=2, vpp=2)),
    "dp2": (2, Layout()),
    "ep2": (2, Layout(ep=2)),
    "tp2-pp2": (4, Layout(tp=2, pp=2)),
    "tp2-sp-pp2-vpp2": (4, Layout(tp=2, pp=2, vpp=2, sequence_parallel=True)),
    "tp2-dp2": (4, Layout(tp=2)),
    "pp2-dp2": (4, Layout(pp=2)),
    "dp4": (4, Layout()),
}


RECOMPUTE = (("recompute_granularity", "full"), ("recompute_method", "uniform"), ("recompute_num_layers", 1))


def shallow(layout: Layout) -> tuple[tuple[str, Any], ...]:
    """Settings of the smallest model of a layout: two layers, or one for each of the chunks of two stages."""
    return (("num_layers", 4 if layout.vpp else 2),)


def in_layouts(*names: str, ci: Sequence[str] = (), slow: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Give a test the ``size`` and ``layout`` of each name; those of ``ci`` and ``slow`` only with such tests."""
    cases = [pytest.param(*LAYOUTS[name], id=name) for name in names]
    cases += [pytest.param(*LAYOUTS[name], id=name, marks=pytest.mark.ci) for name in ci]
    cases += [pytest.param(*LAYOUTS[name], id=name, marks=pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize(("size", "layout"), cases)


def every_way(
    cases: Mapping[str, Any], *, quick: Mapping[str, Collection[str]], ci: Mapping[str, Collection[str]]
) -> list[Any]:
    """Return ``size``, ``layout`` and case for each layout of ``ci`` and each case.

    For a layout, the cases of ``quick`` run by default, CI adds those of ``ci``, and all others are slow.
    """
    return [
        pytest.param(
            *LAYOUTS[layout],
            case,
            id=f"{layout}-{name}",
            marks=[] if name in quick.get(layout, ()) else pytest.mark.ci if name in in_ci else pytest.mark.slow,
        )
        for layout, in_ci in ci.items()
        for name, case in cases.items()
    ]


def in_pipeline(pattern: str | None, layout: Layout) -> str | None:
    """Return a pattern of four layers, perhaps with depths behind them, in stages: of three and one, or of one each."""
    if pattern is None or layout.pp == 1:
        return pattern
    layers, depths = pattern[:4], pattern[4:]
    return ("|".join(layers) if layout.vpp else f"{layers[:3]}|{layers[3]}") + depths


def lacking(job: Any, layout: Layout) -> str | None:
    """Return what the installed megatron-core lacks for a job's model, or None."""
    from megatron.core.transformer import multi_latent_attention

    from mcore_prefix_tree.mcore import release

    letters, settings = set(job.pattern or ""), dict(job.config)
    if letters and not release.HAS_HYBRID_MODEL:
        return "this megatron-core has no HybridModel"
    if letters:
        from megatron.core.models.hybrid.hybrid_layer_allocation import Symbols

        if not letters - {"|", "/"} <= Symbols.VALID_LAYERS:
            return "these layers came with megatron-core 0.19"
    if "linear_key_head_dim" in settings and not release.HAS_DELTA_NET:
        return "Gated DeltaNet follows a tree since megatron-core 0.19"
    if "dsa_indexer_topk" in settings and not release.HAS_SPARSE_ATTENTION:
        return "sparse attention follows a tree since megatron-core 0.19"
    if "mtp_num_layers" in settings and not release.HAS_DEPTHS:
        return f"needs {release.NEEDS_DEPTHS}"
    is_latent = "multi_latent_attention" in settings and "dsa_indexer_topk" not in settings
    if is_latent and layout.sequence_parallel and multi_latent_attention.Linear is None:
        return "this megatron-core takes projections that all ranks hold whole only with TransformerEngine"
    return None
