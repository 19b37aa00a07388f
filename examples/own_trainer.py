"""Train on rollouts of two prompts in a custom loop, and compare the folded gradient with that of unfolded samples.

    python examples/own_trainer.py

The marked block stands for the existing parts of a trainer, for example Megatron's process groups, a model and
rollouts. Here the model is small and on the CPU, in fp64, so that the two gradients are visibly equal.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from mcore_prefix_tree import Sample, fold
from mcore_prefix_tree.mcore import Logprobs, MicroBatch, follow_trees, restore, single_process, tree_forward

PROMPTS = [[5, 17, 3, 42, 8, 30], [5, 17, 3, 9, 11]]
ANSWERS = [[[7, 1], [7, 2, 2], [12, 1]], [[4, 4, 1], [4, 1]]]
REWARDS = [[1.0, 0.0, 0.5], [0.0, 1.0]]


def rollouts() -> list[Sample]:
    """Return each prompt with an answer, scored on the answer only, with its advantage over the mean of its group."""
    samples = []
    for prompt, answers, rewards in zip(PROMPTS, ANSWERS, REWARDS, strict=True):
        for answer, reward in zip(answers, rewards, strict=True):
            mask = [0] * len(prompt) + [1] * len(answer)
            advantage = reward - sum(rewards) / len(rewards)
            samples.append(Sample(prompt + answer, loss_mask=mask, advantage=advantage))
    return samples


def policy_loss(model: torch.nn.Module, samples: list[Sample]) -> torch.Tensor:
    """Return the mean REINFORCE loss of all five samples; replace it by any loss of per-sample log-probabilities."""
    layout = fold(samples)
    # On a GPU: device="cuda", attention_backend="triton".
    batch = MicroBatch.from_layout(layout, device="cpu", attention_backend="path")
    logprob, _ = Logprobs(fused=False).read(tree_forward(model, batch), batch)  # [tokens after folding]
    rows = restore(logprob, layout)  # of each sample [tokens]; entry t is that of tokens[t], and 0 of the first
    print(f"{layout.logical_tokens} tokens of {len(samples)} samples, computed as {layout.physical_tokens}")
    losses = [
        -sample.signals.advantage * row[torch.from_numpy(sample.loss_mask) > 0].sum()
        for sample, row in zip(samples, rows, strict=True)
    ]
    return torch.stack(losses).sum() / sum(map(len, ANSWERS))


def main() -> None:
    """Compute both gradients and print their largest difference."""
    # Your trainer already has this:
    with single_process():
        config = TransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            num_query_groups=2,
            gated_linear_unit=True,
            activation_func=F.silu,
            add_bias_linear=False,
            attention_dropout=0.0,  # samples that share a token would share its dropout
            hidden_dropout=0.0,
            params_dtype=torch.float64,
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec()
        model = GPTModel(config, spec, vocab_size=64, max_sequence_length=64, position_embedding_type="rope").double()
        follow_trees(model)  # this is new

        samples = rollouts()
        policy_loss(model, samples).backward()
        folded = {name: weight.grad for name, weight in model.named_parameters()}

        model.zero_grad(set_to_none=True)
        for sample in samples:
            policy_loss(model, [sample]).backward()
        errors = [
            float((folded[name] - weight.grad).norm() / weight.grad.norm()) for name, weight in model.named_parameters()
        ]
        print(f"largest relative difference of a gradient: {max(errors):.1e}")


if __name__ == "__main__":
    main()
