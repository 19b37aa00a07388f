"""The attention benchmark: our back-ends and stock alternatives on the same forests."""
