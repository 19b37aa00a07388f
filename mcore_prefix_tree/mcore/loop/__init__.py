"""The recipe's own trainer: a recipe in, a trained Megatron-Core GPT out."""
