"""Second models of distillations: loaded, run over the samples before each step, and cut over their own ranks."""
