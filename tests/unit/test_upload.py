from __future__ import annotations

import numpy as np
import pytest
import torch

from mcore_prefix_tree.utils.upload import upload


def test_on_the_cpu_nothing_is_copied():
    array = np.arange(3)
    assert upload(array, "cpu").data_ptr() == array.ctypes.data
    assert upload(array[::2], "cpu").tolist() == [0, 2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there():
    with pytest.raises(ValueError, match="device=cuda: torch sees no GPU; name device='cpu'"):
        upload(np.arange(3), "cuda")
