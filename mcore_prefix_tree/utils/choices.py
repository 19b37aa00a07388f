"""Names that settings choose from. They are the types of options, and help is shown before anything is loaded."""

from __future__ import annotations

from typing import Literal

# Handling of a sample that cannot be used.
OnError = Literal["raise", "skip"]
# Trainers and engines whose names of fields data may have.
DataFormat = Literal["trl", "verl", "slime", "vllm"]
# In which order steps take samples.
Order = Literal["shuffled", "folded", "file"]
# Which common prefixes samples share.
Share = Literal["all", "prompt"]
# How a tree above ``batch.max_tokens`` is cut: each side computes common tokens again, or reads their keys and values.
OverBudget = Literal["repeat", "carry", "auto"]
# How the texts of two tokenizers are aligned.
Aligner = Literal["bytes", "dynamic"]
# Input of a teacher with another tokenizer.
Rendering = Literal["own", "student"]
# How far a teacher is from its student.
Divergence = Literal["forward_kl", "reverse_kl", "jsd"]
