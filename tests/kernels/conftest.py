"""The Triton kernels, on a GPU if one is present, else in Triton's interpreter.

TRITON_INTERPRET=1 selects the interpreter for an entire process, before Triton is imported. So scripts/test runs this
folder twice: among the other tests, which compile the kernels, and by itself in the interpreter:
``TRITON_INTERPRET=1 python -m pytest tests/kernels``.
"""

import os

import torch
from hypothesis import Phase, settings

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    # Shrinking runs a failing example hundreds of times, and the interpreter takes a second for one.
    settings.register_profile(
        "kernels",
        deadline=None,
        derandomize=True,
        phases=[phase for phase in Phase if phase is not Phase.shrink],
        max_examples=40 if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else 12,
    )
    settings.load_profile("kernels")
    collect_ignore = ["test_compile.py", "test_devices.py", "test_specialization.py"]
elif not torch.cuda.is_available():
    collect_ignore = [
        "test_fa4_with_triton.py",
        "test_half_precision.py",
        "test_index_scores.py",
        "test_operator.py",
        "test_softmax.py",
        "test_triton.py",
        "test_tune.py",
    ]
