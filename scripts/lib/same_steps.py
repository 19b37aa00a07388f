"""Train the same steps with two trees of the package, and compare them bitwise; scripts/same_steps calls it.

python scripts/lib/same_steps.py FOLDER         # FOLDER/base and FOLDER/head are the trees
python scripts/lib/same_steps.py FOLDER TREE    # the runs of one tree; PYTHONPATH must point to its code
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

STEPS = 3
WORDS = ["look", "up", "the", "parcel", "it", "is", "lost", "sorry", "you", "are", "terse", "no", "bye"]
RECIPE = """
data: {{path: {inputs}/{model}.jsonl, tokenizer: {inputs}/{model}, order: file}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4, num_query_groups: 2}}
batch: {{global_batch_size: 8, max_tokens: 60}}
optimizer: {{lr: 1e-2, lr_warmup_steps: 1}}
train_iters: {steps}
attention_backend: path
device: cpu
compare: false
verify: {{enabled: false}}
"""
# Each has a different tokenizer.
MODELS = ("student", "teacher")
P_KL = "{{mode: p_kl, top_k: 60, projection: {inputs}/w.safetensors}}"
OBJECTIVES = {
    "sft": "{{name: sft}}",
    "grpo": "{{name: grpo, options: {{kl_coef: 0.05, entropy_coef: 0.01}}}}",
    "dpo": "{{name: dpo, options: {{beta: 0.5}}}}",
    "kto": "{{name: kto, options: {{beta: 0.5}}}}",
    "critic": "{{name: critic, options: {{gamma: 0.9}}}}",
    "distill": "{{name: distill, options: {{teacher: full}}, teacher_recipe: {inputs}/teacher_of_student_tokens.yaml}}",
    "distill of rows": "{{name: distill, options: {{divergence: jsd}}}}",
    "xtoken": f"{{{{name: xtoken, options: {P_KL}, teacher_recipe: {{inputs}}/teacher_of_teacher_tokens.yaml}}}}",
}
LAYOUTS = {
    "one process": "{}",
    "data": "{}",
    "tensor, sequence": "{tensor_model_parallel_size: 2, sequence_parallel: true}",
    "pipeline": "{pipeline_model_parallel_size: 2}",
}


def write_inputs(inputs: Path) -> None:
    """Write tokenizers, and samples in their tokens."""
    from harness.tokenizer_folders import PLAIN, make_folder

    from mcore_prefix_tree.data import load_tokenizer

    inputs.mkdir()
    for model in MODELS:
        folder = make_folder(inputs / model, PLAIN, prepend_space=model == "teacher")
        _write_samples(inputs / f"{model}.jsonl", load_tokenizer(folder))


def _write_samples(path: Path, tokenizer: Any) -> None:
    """Write five groups of two pairs, with the fields of all objectives."""
    rng = np.random.default_rng(0)
    with path.open("w") as stream:
        for number in range(20):
            if number % 4 == 0:
                prompt = " ".join(rng.choice(WORDS, size=3))
            if number % 2 == 0:
                turn = " ".join(rng.choice(WORDS, size=2))
            text = f" {turn} {' '.join(rng.choice(WORDS, size=2 + number % 3))}"
            asked = tokenizer.encode_text(prompt)
            tokens = asked + tokenizer.encode_text(text)
            scores = (-4 + 0.3 * rng.standard_normal((3, len(tokens)))).tolist()
            row = {
                "tokens": tokens,
                "loss_mask": [0.0] * len(asked) + rng.choice([0.5, 1.0], size=len(tokens) - len(asked)).tolist(),
                "reward": float(rng.random()),
                "group": number // 4,
                "pair": number // 2,
                "chosen": number % 2 == 0,
                "label": number % 3 == 0,
                "mismatched": number % 4 == 0,
                "old_logprobs": scores[0],
                "ref_logprobs": scores[1],
                "values": scores[2],
                "teacher": {"token_ids": [[5, 6, 7]] * len(tokens), "logprobs": [[-1.0, -2.0, -3.0]] * len(tokens)},
            }
            stream.write(json.dumps(row) + "\n")


class Runs:
    """Runs of the tree that this process imports, in a folder of both trees, the inputs and the results."""

    def __init__(self, folder: Path, tree: str) -> None:
        import mcore_prefix_tree

        found = Path(mcore_prefix_tree.__file__)
        if not found.is_relative_to(folder / tree):
            raise SystemExit(f"{found} is imported, not that of {folder / tree}")
        self._inputs, self._results, self._tree = folder / "inputs", folder / f"{tree}_results", tree
        self._results.mkdir()
        # The current folder is searched for modules too.
        os.chdir(self._results)

    def make_teachers(self) -> None:
        """Train the teachers of both trees, and build the projection."""
        for model in MODELS:
            recipe = self._inputs / f"teacher_of_{model}_tokens.yaml"
            saved = f"checkpoint: {{save: {self._inputs / model}_runs}}\n"
            recipe.write_text(RECIPE.format(inputs=self._inputs, model=model, steps=2) + saved)
            self._run(1, "train", recipe, "seed=3")
        named = ["--student", self._inputs / "student", "--teacher", self._inputs / "teacher"]
        self._run(1, "xtoken", "build-projection", *named, self._inputs / "w.safetensors")

    def train(self, name: str, layout: str) -> dict[str, Any]:
        """Return a run's steps and the hashes of its checkpoint's tensors."""
        print(f"{self._tree}: {name}, {layout}", flush=True)
        recipe, metrics, saved = (self._results / f"{name}, {layout}{end}" for end in (".yaml", ".jsonl", ""))
        recipe.write_text(RECIPE.format(inputs=self._inputs, model="student", steps=STEPS))
        self._run(
            1 if layout == "one process" else 2,
            "train",
            recipe,
            f"objective={OBJECTIVES[name].format(inputs=self._inputs)}",
            f"parallel={LAYOUTS[layout]}",
            f"validation={{path: {self._inputs}/student.jsonl, eval_interval: 2}}",
            f"log={{metrics: '{metrics}'}}",
            f"checkpoint={{save: '{saved}'}}",
        )
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        steps = [{name: value for name, value in line.items() if "second" not in name} for line in lines]
        return {"steps": steps, "weights": _hashes(saved / f"iter_{STEPS:07d}")}

    def _run(self, ranks: int, *words: object) -> None:
        from harness.forked_ranks import launch

        arguments = ["-m", "mcore_prefix_tree", *map(str, words)]
        code, _, complaint = launch(ranks, arguments, environment=dict(os.environ), timeout_s=1800)
        if code:
            raise SystemExit(f"{self._tree}: {' '.join(arguments)} failed\n{complaint}")


def _hashes(checkpoint: Path) -> dict[str, str]:
    import torch

    from mcore_prefix_tree.mcore import single_process

    with single_process():
        from megatron.core import dist_checkpointing

        content = dist_checkpointing.load_plain_tensors(str(checkpoint))
    return {
        name: f"{value.dtype} {list(value.shape)} "
        + hashlib.sha256(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, value in content.items()
        if isinstance(value, torch.Tensor)
    }


def compare(base: dict[str, Any], head: dict[str, Any]) -> str:
    """Return ``same``, or the first difference of two runs."""
    if len(base["steps"]) != len(head["steps"]):
        return f"DIFFERS: {len(base['steps'])} and {len(head['steps'])} lines of metrics"
    for at, (one, other) in enumerate(zip(base["steps"], head["steps"], strict=True)):
        for name in one.keys() | other.keys():
            if one.get(name) != other.get(name):
                return f"DIFFERS: line {at + 1} of the metrics, {name}: {one.get(name)} and {other.get(name)}"
    one, other = base["weights"], head["weights"]
    different = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"DIFFERS: {len(different)} tensors of the checkpoint, first {different[0]}" if different else "same"


def main(folder: Path) -> int:
    """Run both trees; print the table, and return the exit status."""
    results = []
    for tree in ("base", "head"):
        path = os.pathsep.join(str(folder / tree / part) for part in (".", "tests"))
        subprocess.run([sys.executable, __file__, folder, tree], env=os.environ | {"PYTHONPATH": path}, check=True)
        results.append(json.loads((folder / f"{tree}.json").read_text()))
    base, head = results
    compared = {case: compare(base[case], head[case]) for case in base}
    print(f"\n{'objective, layout':33} {'lines':>5} {'tensors':>7}  result")
    for case, result in compared.items():
        print(f"{case:33} {len(base[case]['steps']):5} {len(base[case]['weights']):7}  {result}")
    return int(set(compared.values()) != {"same"})


def run_tree(folder: Path, tree: str) -> None:
    """Write the results of one tree; the first makes the teachers of both."""
    runs = Runs(folder, tree)
    if tree == "base":
        write_inputs(folder / "inputs")
        runs.make_teachers()
    results = {f"{name}, {layout}": runs.train(name, layout) for name in OBJECTIVES for layout in LAYOUTS}
    (folder / f"{tree}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    if len(sys.argv) > 2:
        run_tree(Path(sys.argv[1]), sys.argv[2])
    else:
        sys.exit(main(Path(sys.argv[1])))
