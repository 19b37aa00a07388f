"""Parallel layouts by name: how many processes, and how they are cut."""

from __future__ import annotations

from collections.abc import Sequence

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


def in_layouts(*names: str, ci: Sequence[str] = (), slow: Sequence[str] = ()) -> pytest.MarkDecorator:
    """Give a test the ``size`` and ``layout`` of each name; those of ``ci`` and ``slow`` only with such tests."""
    cases = [pytest.param(*LAYOUTS[name], id=name) for name in names]
    cases += [pytest.param(*LAYOUTS[name], id=name, marks=pytest.mark.ci) for name in ci]
    cases += [pytest.param(*LAYOUTS[name], id=name, marks=pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize(("size", "layout"), cases)
