"""The seam: the code that Megatron-Core calls, and its arguments, so that a stock model follows a tree."""
