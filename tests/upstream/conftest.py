from pathlib import Path

import pytest
from megatron_lm import FIRST, MODEL, Stock, only_checkpoint, train_unfolded


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Twenty iterations on unfolded samples, with a checkpoint after the first, to start from, and at the end."""
    return train_unfolded(MODEL, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def base(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock run's first checkpoint, as the only one of its folder."""
    return only_checkpoint(stock.folder, FIRST, tmp_path_factory.mktemp("base"))
