import torch

# Tensors here are small, and more threads than free cores make them slower by an order of magnitude.
torch.set_num_threads(1)
