from pathlib import Path

import pytest
from megatron_lm import FIRST, MODEL, Stock, each_sample_alone, only_checkpoint


@pytest.fixture(scope="session")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Twenty iterations of each sample alone, with a checkpoint after the first, to start from, and at the end."""
    return each_sample_alone(MODEL, tmp_path_factory.mktemp("stock"))


@pytest.fixture(scope="session")
def base(stock: Stock, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stock run's first checkpoint, as the only one of its folder."""
    return only_checkpoint(stock.folder, FIRST, tmp_path_factory.mktemp("base"))
