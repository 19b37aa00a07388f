"""Cross-tokenizer distillation: a student learns from a teacher that has another tokenizer."""
