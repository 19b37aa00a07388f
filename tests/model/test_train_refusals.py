"""A user's mistakes: one sentence on standard error, exit code 2, and nothing trained or written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness.commands import run_command
from harness.train_jobs import rows

from mcore_prefix_tree.settings import RecipeError, command_checks, load_recipe
from mcore_prefix_tree.settings.command_checks import CHECKS

T = "model.transformer"
LATENT = "model.transformer.multi_latent_attention=true model.num_query_groups=null"
YARN = (
    "model.position_embedding_type=yarn model.yarn.rotary_scaling_factor=4 "
    "model.yarn.original_max_position_embeddings=8"
)
DROPOUT = "samples that share a token would share its dropout"


@pytest.mark.parametrize("name", ["train", "verify"])
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("data.path=nope.jsonl", "nope.jsonl: no such file in "),
        ("data.path=nope/*.jsonl", "nope/*.jsonl: this glob matches no file in "),
        (
            "model.transformer_impl=transformer_engine model.dtype=float64 optimizer.clip_grad=0",
            "model.dtype=float64: TransformerEngine has no such layers; set model.transformer_impl=local",
        ),
        ("data.tokenizer=nope", "tokenizer 'nope' is neither a folder nor one of "),
        ("parallel.tensor_model_parallel_size=2", "need a multiple of 2 ranks, but this job has 1; start it with"),
        ("parallel.tensor_model_parallel_size=3", "num_attention_heads (4) must be a multiple of tensor_model"),
        ("parallel.pipeline_model_parallel_size=2", "need a multiple of 2 ranks, but this job has 1; start it with"),
        ("parallel.virtual_pipeline_model_parallel_size=2", "needs parallel.pipeline_model_parallel_size above 1"),
        ("parallel.context_parallel_size=2", "does not support context_parallel_size=2"),
        ("parallel.sequence_parallel=true", "Cannot use sequence parallelism without tensor parallelism"),
        ("model.transformer.attention_dropout=0.1", f"does not support attention_dropout=0.1: {DROPOUT}"),
        ("model.transformer.hidden_dropout=0.1", f"does not support hidden_dropout=0.1: {DROPOUT}"),
        ("model.transformer.expert_model_parallel_size=2", "other keys of the recipe, or folding, decide this"),
        ("model.transformer.expert_tensor_parallel_size=1", "other keys of the recipe, or folding, decide this"),
        ("parallel.expert_model_parallel_size=2", "num_moe_experts must be non None to use expert-parallel"),
        ("model.transformer.tp_comm_overlap=true", "does not support tp_comm_overlap=True: its buffers have one"),
        ("model.transformer.window_size=[16,0]", "finds none that supports this run (path: window=17 "),
        (f"attention_backend=path {T}.window_size=[16,0]", "attention backend 'path' does not support window=17 "),
        (
            "model.transformer.multi_latent_attention=true",
            "model.num_query_groups has no meaning with model.transformer.multi_latent_attention: its heads are ",
        ),
        (
            f"{LATENT} model.kv_channels=8",
            "model.kv_channels has no meaning with model.transformer.multi_latent_attention: its heads are ",
        ),
        (
            f"{LATENT} model.rope_scaling=true",
            "model.transformer.multi_latent_attention has separate rotary embeddings: unset model.rope_scaling, ",
        ),
        (
            f"{LATENT} model.rotary_percent=0.5",
            "model.rotary_percent: YaRN, the default of model.transformer.rope_type, turns all channels that have",
        ),
        (
            f"{LATENT} model.transformer.qk_pos_emb_head_dim=7",
            "model.transformer.qk_pos_emb_head_dim and model.rotary_percent leave 7; change one of them",
        ),
        (
            f"{LATENT} parallel.tensor_model_parallel_size=2 parallel.sequence_parallel=true",
            "parallel.tensor_model_parallel_size above 1 needs model.transformer_impl=transformer_engine, without ",
        ),
        (f"{LATENT} {T}.nope=1", f"{T}.nope: megatron-core's MLATransformerConfig has no such field"),
        (f"{LATENT} {T}.rope_type=x", f"and set {T}.rope_type, to rope or yarn"),
        ("model.transformer.nope=1", "model.transformer.nope: megatron-core's TransformerConfig has no such field"),
        (f"{T}.num_layers=4", f"{T}.num_layers: other keys of the recipe, or folding,"),
        ("model.transformer.calculate_per_token_loss=false", "model.transformer.calculate_per_token_loss: other keys"),
        ("model.transformer.fp16=true", "model.transformer.fp16: other keys of the recipe, or folding, decide this"),
        ("model.num_query_groups=3", "model.num_attention_heads=4 is not a multiple of model.num_query_groups=3"),
        ("model.kv_channels=7", "of the 7 of each head model.rotary_percent=1 takes 7; change it, model.kv_"),
        ("model.rotary_percent=0.4", "of the 8 of each head model.rotary_percent=0.4 takes 3; change it, model.kv_"),
        ("model.rotary_percent=0.1", "of the 8 of each head model.rotary_percent=0.1 takes 0; change it, model.kv_"),
        ("model.position_embedding_type=yarn", "model.position_embedding_type=yarn and model.yarn, which has its "),
        (
            "model.yarn.rotary_scaling_factor=4 model.yarn.original_max_position_embeddings=8",
            "model.position_embedding_type=yarn and model.yarn, which has its settings, come together; set ",
        ),
        (
            "model.position_embedding_type=yarn model.yarn.rotary_scaling_factor=4",
            "model.yarn.original_max_position_embeddings: field required",
        ),
        (f"{YARN} model.rotary_percent=0.5", "model.position_embedding_type=yarn turns all channels of a head and "),
        (f"{YARN} model.kv_channels=7", "of the 7 of each head model.rotary_percent=1 takes 7; change it, model.kv_"),
        ("model.rotary_percent=2", "model.rotary_percent: input should be less than or equal to 1 (given 2)"),
        ("model.position_embedding_type=mrope", "model.position_embedding_type: input should be 'rope', "),
        (
            "model.position_embedding_type=learned_absolute model.max_position_embeddings=14",
            "data.jsonl:1: the sample has 15 tokens, but model.max_position_embeddings is 14; raise model.max_position",
        ),
        ("model.vocab_size=null", "model.vocab_size is missing; set it, or name a data.tokenizer to take it from"),
        ("model.vocab_size=50", "data.jsonl:1: field 'tokens' has 54 at index 0, outside the model's vocabulary of 50"),
        ("data.tokenizer=mistral-v7", "model.vocab_size=64 is smaller than the tokenizer's 32768; raise it or"),
        (
            "batch.max_tokens=14 batch.over_budget=repeat",
            "data.jsonl:1: the sample has 15 tokens, but batch.max_tokens is 14; raise batch.max_",
        ),
        (
            "model.transformer.cuda_graph_impl=transformer_engine",
            "model.transformer.cuda_graph_impl=transformer_engine captures graphs for each length of micro-batches; "
            "set batch.length_buckets",
        ),
        (
            "model.transformer.cuda_graph_impl=transformer_engine batch.length_buckets=[]",
            "captures graphs for each length of micro-batches; set batch.length_buckets",
        ),
        (
            "model.transformer.cuda_graph_impl=local batch.length_buckets=[64]",
            "cuda_graph_impl='local' with cuda_graph_modules=[]: a graph replays the tree of its capture",
        ),
        ("attention_backend=nope", "attention backend 'nope' does not exist; choose one of "),
        ("train_iters=zero", "recipe.yaml: train_iters: input should be a valid integer"),
        ("train_iters", "'train_iters' is not an override; write key=value"),
    ],
)
def test_one_sentence_and_exit_code_2(job: Path, name: str, overrides: str, says: str) -> None:
    result = run_command(name, job, *overrides.split())
    assert says in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, result.stdout) == (2, "")
    # Nothing of the session stays behind.
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ("model.dtype=float64", "optimizer.clip_grad: Megatron clips fp32 gradients; set it to 0 with model.dtype"),
        (
            "model.dtype=float64 optimizer.clip_grad=0 optimizer.use_distributed_optimizer=true",
            "optimizer.use_distributed_optimizer: Megatron's takes no model.dtype=float64",
        ),
        ("optimizer.lr_warmup_steps=6", "optimizer.lr_warmup_steps=6 must be below train_iters=6; lower it, "),
        ("optimizer.min_lr=1", "optimizer.min_lr=1.0 is above optimizer.lr=0.01"),
    ],
)
def test_settings_that_only_training_rejects(job: Path, overrides: str, says: str) -> None:
    result = run_command("train", job, *overrides.split())
    assert says in result.stderr
    assert result.stderr.count("\n") == 1
    assert (result.exit_code, result.stdout) == (2, "")
    assert run_command("verify", job, *overrides.split()).exit_code == 0


def test_loading_for_a_task_reports_all_mistakes(job: Path) -> None:
    overrides = ["data.path=nope.jsonl", "batch.length_buckets=[8]", "optimizer.lr_warmup_steps=6"]
    buckets, warm_up, files = (
        "batch.length_buckets: the largest, 8",
        "lr_warmup_steps=6 must be below",
        "nope.jsonl: no",
    )
    for task, sentences in (
        ("train", [warm_up, buckets, files]),
        ("verify", [buckets, files]),
        ("score", [buckets, files]),
    ):
        with pytest.raises(RecipeError) as error:
            load_recipe(job, overrides, CHECKS[task])
        found = [str(error.value).find(sentence) for sentence in sentences]
        assert found == sorted(found)
        assert found[0] >= 0


def test_a_command_checks_a_recipe_once(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    honest = command_checks.resolve_paths
    monkeypatch.setattr(command_checks, "resolve_paths", lambda paths: (checked.append(paths), honest(paths))[1])
    assert run_command("verify", job).exit_code == 0
    assert checked == [load_recipe(job).data.path]


def test_an_optimizer_without_float64(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.core.optimizer.distrib_optimizer.HAVE_APEX_OR_TE", True)
    result = run_command("train", job, "model.dtype=float64", "optimizer.clip_grad=0", code=2)
    assert "model.dtype=float64: Megatron takes the FusedAdam of TransformerEngine or Apex if" in result.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_gpu_that_is_not_there(job: Path) -> None:
    result = run_command("train", job, "device=cuda")
    assert result.stderr == "error: device=cuda, but torch sees no GPU; set device=auto or device=cpu\n"
    assert result.exit_code == 2


def test_transformer_engine_that_is_not_there(job: Path) -> None:
    from megatron.core.extensions.transformer_engine import HAVE_TE

    if HAVE_TE:
        pytest.skip("TransformerEngine is installed")
    result = run_command("train", job, "model.transformer_impl=transformer_engine", code=2)
    assert "TransformerEngine is not installed; pip install transformer-engine[pytorch] or set" in result.stderr


def test_unwritable_checkpoint_folder_is_rejected_before_the_first_step(job: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    setting = f"checkpoint.save={tmp_path / 'file' / 'saved'}"
    result = run_command("train", job, setting)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr == f"error: {setting}: Not a directory; name a folder to write to\n"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "<stdin>:2: not valid JSON"),
        ('{"tokens": [1, 64]}', "<stdin>:2: field 'tokens' has 64 at index 1, outside the model's vocabulary of 64"),
        ('{"messages": []}', "<stdin>:2: field 'messages' needs a tokenizer; set data.tokenizer"),
    ],
)
def test_bad_data_on_standard_input(job: Path, line: str, says: str) -> None:
    result = run_command("train", job, "data.path=-", stdin='{"tokens": [1, 2]}\n' + line + "\n")
    assert (result.exit_code, result.stdout) == (2, "")
    assert says in result.stderr


def test_the_edges_of_the_limits_are_inside(job: Path) -> None:
    longest = max(len(row["tokens"]) for row in rows())
    highest = max(max(row["tokens"]) for row in rows())
    result = run_command(
        "train",
        job,
        f"batch.max_tokens={longest}",
        f"model.vocab_size={highest + 1}",
        "model.position_embedding_type=learned_absolute",
        f"model.max_position_embeddings={longest}",
        "train_iters=3",
        code=0,
    )
    assert sum(line.startswith("step ") for line in result.stdout.splitlines()) == 3
