"""Ranks of a job as data, checkpoints and messages see them; ``mcore/ranks.py`` makes those of torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_NAMED_HOSTS = 3


def _alone(value: Any) -> list[Any]:
    return [value]


def _by_itself(action: Callable[[], Any]) -> Any:
    return action()


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """Ranks that share work on the same data; ``on_main`` runs an action on the main rank, with its result on all."""

    rank: int = 0
    size: int = 1
    gather: Callable[[Any], list[Any]] = _alone
    on_main: Callable[[Callable[[], Any]], Any] = _by_itself


ALONE = Ranks()


def name_ranks(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return the names of ranks in order, for example ``ranks 8-15 on node-b``; ``hosts`` are those of all ranks."""
    by_host: dict[str, list[int]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(rank)
    named = [
        f"{'rank' if len(own) == 1 else 'ranks'} {_spans(own)} on {host}"
        for host, own in list(by_host.items())[:_NAMED_HOSTS]
    ]
    if (more := len(by_host) - _NAMED_HOSTS) > 0:
        named.append(f"those of {more:,} other machine{'' if more == 1 else 's'}")
    return " and ".join(named)


def _spans(numbers: Sequence[int]) -> str:
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)
