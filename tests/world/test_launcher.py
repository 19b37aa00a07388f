from __future__ import annotations

import gc
import os
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from harness.groups import LEFT_BEHIND
from harness.worlds import Layout, WorkerError, World, world


def ranks(offset: int) -> tuple[int, int, int, int, float, int]:
    from megatron.core import parallel_state as state

    total = torch.tensor([float(dist.get_rank())], device="cuda")
    dist.all_reduce(total)
    return (
        state.get_tensor_model_parallel_rank(),
        state.get_pipeline_model_parallel_rank(),
        state.get_data_parallel_rank(),
        state.get_data_parallel_world_size(),
        total.item() + offset,
        os.getpid(),
    )


def fail_in_rank_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("only here")
    dist.barrier()


def die_in_rank_one() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def sleep_in_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)


def leave_a_message_undelivered() -> None:
    if dist.get_rank() == 0:
        dist.isend(torch.full((1,), 99.0), dst=1)


def receive() -> float:
    message = torch.zeros(1)
    if dist.get_rank() == 0:
        dist.send(torch.full((1,), 7.0), dst=1)
    else:
        dist.recv(message, src=0)
    return message.item()


def start_threads(number: int) -> int:
    for _ in range(number):
        threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
    return os.getpid()


def keep_a_group_in_a_cycle() -> int:
    gc.disable()  # or Python might collect it by itself
    cycle: list[object] = [dist.new_group()]
    cycle.append(cycle)
    return psutil.Process().num_threads()


def raw_weights() -> dict[str, torch.Tensor]:
    from harness.models import build_chunks, tiny_gpt_config

    layout = Layout(tp=dist.get_world_size())
    (chunk,) = build_chunks(tiny_gpt_config(layout=layout, num_layers=1))
    return {name: parameter.detach() for name, parameter in chunk.named_parameters()}


def has_preloaded() -> bool:
    return "harness.preload" in sys.modules and "torch._inductor.compile_fx" not in sys.modules


def test_ranks_find_megatron_imported() -> None:
    """Multiprocessing says nothing of a module that its server did not find; each rank would spend four seconds."""
    assert world(1).run(has_preloaded, layout=Layout()) == [True]


def test_groups_end_with_their_call() -> None:
    alone = World(1)
    try:
        threads = {alone.run(keep_a_group_in_a_cycle, layout=Layout())[0] for _ in range(4)}
    finally:
        alone.close()
    assert len(threads) == 1


def test_a_world_that_keeps_threads_starts_anew() -> None:
    pids = [set(world(2).run(start_threads, number, layout=Layout(tp=2))) for number in (0, LEFT_BEHIND, 0, 0)]
    assert pids[0] == pids[1]
    assert not pids[1] & pids[2]
    assert pids[2] == pids[3]


def test_an_error_is_raised_here_with_its_traceback() -> None:
    with pytest.raises(WorkerError, match=r"(?s)rank 1 of a world of 2.*fail_in_rank_one.*KeyError: 'only here'"):
        world(2).run(fail_in_rank_one, layout=Layout())
    assert len(world(2).run(ranks, 0, layout=Layout())) == 2, "the world starts again"


def test_a_dead_rank_is_named() -> None:
    with pytest.raises(WorkerError, match=r"rank 1 of a world of 2.*\n.*died"):
        world(2).run(die_in_rank_one, layout=Layout())


def test_a_rank_that_hangs_is_given_up_and_ended() -> None:
    before = world(2).run(ranks, 0, layout=Layout())
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="world of 2"):
        world(2).run(sleep_in_rank_one, layout=Layout(), timeout_s=1)
    assert time.monotonic() - start < 60  # the rank sleeps for 600
    for result in before:
        with pytest.raises(ProcessLookupError):
            os.kill(result[5], 0)


def test_calls_are_isolated() -> None:
    world(2).run(leave_a_message_undelivered, layout=Layout())
    assert world(2).run(receive, layout=Layout())[1] == 7.0


def test_weights_are_cut_as_megatron_computes_with_them() -> None:
    (whole,) = world(1).run(raw_weights, layout=Layout())
    parts = world(2).run(raw_weights, layout=Layout(tp=2))

    def both(name: str) -> list[torch.Tensor]:
        return [part[name] for part in parts]

    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        assert torch.equal(torch.cat(both(name)), whole[name])
    attention = "decoder.layers.0.self_attention."
    assert torch.equal(torch.cat(both(attention + "linear_qkv.weight")), whole[attention + "linear_qkv.weight"])
    assert torch.equal(torch.cat(both(attention + "linear_proj.weight"), 1), whole[attention + "linear_proj.weight"])
    # A rank's fc1 is [its gate; its up], not a contiguous half of [gate; up].
    gates, ups = zip(*(part.chunk(2) for part in both("decoder.layers.0.mlp.linear_fc1.weight")), strict=True)
    assert torch.equal(torch.cat([*gates, *ups]), whole["decoder.layers.0.mlp.linear_fc1.weight"])
    for name in ("decoder.layers.0.input_layernorm.weight", "decoder.final_layernorm.weight"):
        assert all(torch.equal(part, whole[name]) for part in both(name))
        assert abs(whole[name].mean() - 1) < 0.1
