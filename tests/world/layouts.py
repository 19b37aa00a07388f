"""Parallel layouts by name: how many processes, and how they are cut."""

from __future__ import annotations

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
    "dp4": (4, Layout()),
}


def in_layouts(*names: str) -> pytest.MarkDecorator:
    """Gives a test ``size`` and ``layout`` of each."""
    return pytest.mark.parametrize(("size", "layout"), [pytest.param(*LAYOUTS[name], id=name) for name in names])
