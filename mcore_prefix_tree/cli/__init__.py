"""The command line: one module per command, or for several that are alike, listed in ``main``."""
