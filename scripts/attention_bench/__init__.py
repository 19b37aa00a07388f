"""The attention benchmark: our back-ends, stock alternatives and other projects' kernels on the same forests."""
