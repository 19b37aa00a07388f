"""The training job: a recipe in, a trained Megatron-Core GPT out."""
