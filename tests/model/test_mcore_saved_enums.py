"""Enums in checkpoints are loaded by torch's safe loader, regardless of how the running Python pickles an enum."""

from __future__ import annotations

import copyreg
import io
import pickle
import signal
from argparse import Namespace
from enum import Enum

import pytest
import torch
from megatron.core.transformer.enums import AttnBackend

from mcore_prefix_tree.mcore.checkpoints.integrity import pickle_enums_by_value


def by_name(member: Enum, protocol: int) -> tuple[object, ...]:
    """A pickle of Python 3.11.2."""
    return getattr, (type(member), member.name)


def saved(args: Namespace) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(args, file)
    file.seek(0)
    return file


def test_arguments_can_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    args = Namespace(attention_backend=AttnBackend.auto, exit_signal=signal.SIGTERM)
    for kind in (AttnBackend, signal.Signals):
        monkeypatch.setattr(kind, "__reduce_ex__", by_name)
        monkeypatch.delitem(copyreg.dispatch_table, kind, raising=False)
    with pytest.raises(pickle.UnpicklingError, match="getattr"):
        torch.load(saved(args), weights_only=True)
    pickle_enums_by_value()
    assert torch.load(saved(args), weights_only=True) == args
