from pathlib import Path

import pytest
from megatron_lm import (
    CPU,
    FIRST,
    ITERATIONS,
    MODEL,
    STOCK,
    TRAIN,
    UNFOLDED,
    Stock,
    only_checkpoint,
    trained,
    write_samples,
)


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Twenty iterations of each sample alone, with a checkpoint after the first, to start from, and at the end."""
    root = tmp_path_factory.mktemp("stock")
    write_samples(root / "samples.jsonl")
    data = f"--prefix-tree-data-path {root / 'samples.jsonl'} --prefix-tree-order file"
    common = (CPU, MODEL, TRAIN, UNFOLDED, data, f"--save {root / 'saved'}")
    first = trained(STOCK, *common, f"--exit-interval {FIRST}")
    rest = trained(STOCK, *common, f"--load {root / 'saved'}")
    losses = first.losses | rest.losses
    assert sorted(losses) == list(range(1, ITERATIONS + 1))
    return Stock(data, root / "saved", losses, first.iterations | rest.iterations)


@pytest.fixture(scope="session")
def base(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock run's first checkpoint, as the only one of its folder."""
    return only_checkpoint(stock.folder, FIRST, tmp_path_factory.mktemp("base"))
