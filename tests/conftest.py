import signal

import torch
from hypothesis import settings

# Shells start background jobs with Ctrl-C ignored, which the commands under test would inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors here are small, and more threads than free cores make them slower by an order of magnitude.
torch.set_num_threads(1)

# Machines that run tests are busy; a slow example is not a failure. Time limits are in the tests that are about time.
settings.register_profile("tests", deadline=None, print_blob=True)
settings.load_profile("tests")
