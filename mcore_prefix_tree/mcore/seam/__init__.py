"""The seam: what Megatron-Core calls, and what it is called with, so that a stock model follows a tree."""
