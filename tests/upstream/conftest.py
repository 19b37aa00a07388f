import torch

torch.set_num_threads(1)


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: takes more processes than a small machine has cores")
