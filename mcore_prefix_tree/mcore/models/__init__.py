"""The models that recipes describe: built from megatron-core's pieces, and filled with the weights of folders."""
