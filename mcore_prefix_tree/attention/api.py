"""The one entrance to tree attention: it validates a call, selects the named back-end and passes the call to it.

A back-end is a module with the functions of :class:`Backend`, and none imports another, but ``fa4`` borrows the
backward of ``triton``. It must be importable on any machine: its functions import the packages that it needs in
addition to torch.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol, cast

from mcore_prefix_tree.attention.backend_options import AttentionOptions, Case, cast_inputs, without_autocast
from mcore_prefix_tree.utils.lazy_torch import torch

if TYPE_CHECKING:
    from mcore_prefix_tree.metadata import TreeMetadata


class Backend(Protocol):
    """Functions of a back-end's module."""

    def attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        metadata: TreeMetadata,
        options: AttentionOptions,
    ) -> torch.Tensor:
        """Attend as :func:`tree_attention`, with its shapes ``[P, H, D]``; the arguments are already checked."""

    def refusal(self, case: Case) -> str | None:
        """Name the argument that is not supported, and say why; None if the case is supported."""

    def check(self, case: Case) -> None:
        """Compare non-torch kernels with the reference, once per kind of case; raise ParityError if they are wrong."""

    def plan(self, metadata: TreeMetadata, case: Case) -> object:
        """Return the tree data that :meth:`attention` reads in such a call, made on first use and kept in its cache.

        A planning thread calls it on host metadata, so that no layer has to wait for it; its tensors are then moved
        with :meth:`TreeMetadata.with_plans_on`.
        """


# A setting of a job, which becomes the name of a back-end before its first micro-batch; see auto.py.
AUTO = "auto"

# The module is imported when its name is first used.
BACKENDS: dict[str, str] = {
    "path": "mcore_prefix_tree.attention.path",
    "reference": "mcore_prefix_tree.attention.reference",
    "triton": "mcore_prefix_tree.attention.triton_tree",
    "fa4": "mcore_prefix_tree.attention.fa4",
    "cascade": "mcore_prefix_tree.attention.cascade",
    "flex": "mcore_prefix_tree.attention.flex",
}


# The modules that were used before. torch.compile can follow a look-up here, but not an import.
_LOADED: dict[str, Backend] = {}


def check_backend(name: str) -> None:
    """Raise ValueError, which names the known back-ends, if ``name`` is not one."""
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} does not exist; choose one of {', '.join(sorted(BACKENDS))}")


def check_setting(name: str) -> None:
    """Raise ValueError if ``name`` is neither a back-end nor :data:`AUTO`."""
    if name != AUTO:
        check_backend(name)


def load_backend(name: str) -> Backend:
    """Return the module of a back-end; raises ValueError as :func:`check_backend` does."""
    check_backend(name)
    if name not in _LOADED:
        _LOADED[name] = cast(Backend, import_module(BACKENDS[name]))
    return _LOADED[name]


def supporting(case: Case) -> list[str]:
    """Return the back-ends that do not refuse a case, in the order of :data:`BACKENDS`."""
    return [name for name in BACKENDS if load_backend(name).refusal(case) is None]


def check_case(name: str, case: Case) -> None:
    """Raise ValueError if a back-end rejects a case: names the argument at fault and the way out."""
    reason = load_backend(name).refusal(case)
    if reason is None:
        return
    others = ", ".join(supporting(case)) or "no backend does"
    way_out = f"backends that do: {others}"
    if case.options.deterministic:
        relaxed = replace(case, options=replace(case.options, deterministic=False))
        if load_backend(name).refusal(relaxed) is None:
            way_out += f"; {name!r} itself runs with deterministic_attention=false"
    raise ValueError(f"attention backend {name!r} does not support {reason}; {way_out}")


def tree_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    *,
    softmax_scale: float,
    backend: str = "path",
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """Attention in which every token sees its own path: query i sees key j if ``j <= i < subtree_end[j]``.

    Under ``torch.autocast``, query, key and value are cast first, as those of SDPA.

    Args:
        query: ``[P, H, D]``, P the padded size of the micro-batch.
        key: ``[P, K, D]``; K divides H, each key head serves H / K consecutive query heads.
        value: ``[P, K, W]``.
        metadata: tree of the micro-batch.
        softmax_scale: factor on the scores before the softmax.
        backend: a key of :data:`BACKENDS`.
        window: number of keys that a query sees, by position; see :class:`AttentionOptions`.
        sinks: ``[H]``; see :class:`AttentionOptions`.
        deterministic: whether to give the same bits twice; see :class:`AttentionOptions`.

    Returns:
        ``[P, H, W]``, in the query's dtype.

    Raises:
        ValueError: if an argument does not fit the metadata or the others, or the back-end does not exist or does not
            support the call.
    """
    options = AttentionOptions(softmax_scale=softmax_scale, window=window, sinks=sinks, deterministic=deterministic)
    query, key, value = cast_inputs(query, key, value)
    if torch.compiler.is_compiling():
        _check_call(query, key, value, metadata, options, backend)
    else:
        # The layers of a micro-batch make the same call: the first is checked.
        given = [(one.shape, one.dtype, one.device, one.requires_grad) for one in (query, key, value)]
        of_sinks = None if sinks is None else sinks.shape
        call = (backend, softmax_scale, window, of_sinks, deterministic, torch.is_grad_enabled(), *given)
        checked = metadata.cache.setdefault("checked calls", set())
        if call not in checked:
            _check_call(query, key, value, metadata, options, backend)
            checked.add(call)
    with without_autocast(query.device):
        return load_backend(backend).attention(query, key, value, metadata, options)


def _check_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: TreeMetadata,
    options: AttentionOptions,
    backend: str,
) -> None:
    """Check a call with ``[P, H, D], [P, K, D], [P, K, W]``; raise ValueError as :func:`tree_attention` does."""
    check_backend(backend)
    shapes = f"query {tuple(query.shape)}, key {tuple(key.shape)}, value {tuple(value.shape)}"
    if not query.ndim == key.ndim == value.ndim == 3:
        raise ValueError(f"tree attention takes [tokens, heads, head_dim] tensors, not {shapes}")
    if not query.shape[0] == key.shape[0] == value.shape[0] == metadata.padded_size:
        raise ValueError(f"{shapes} must all have the {metadata.padded_size} tokens of the tree metadata")
    if key.shape[1] != value.shape[1] or query.shape[1] % key.shape[1] or query.shape[2] != key.shape[2]:
        raise ValueError(f"the heads or head dimensions of {shapes} do not fit together")
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(f"query, key and value have the dtypes {query.dtype}, {key.dtype} and {value.dtype}: use one")
    if options.window is not None and options.window < 1:
        raise ValueError(f"window={options.window} must be at least 1, a query itself, or None for no window")
    if options.sinks is not None and options.sinks.shape != query.shape[1:2]:
        raise ValueError(f"sinks {tuple(options.sinks.shape)} must have one logit for each of {query.shape[1]} heads")
    check_case(backend, Case.of(query, key, value, options))
