"""Pages show their commands' output: each is run in order, in a reader's folder.

After a change of the output, ``scripts/render_pages.py`` writes the output blocks anew.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from page_exceptions import AFTER, LONG, NOT_RUN, QUOTED, REPEATED, reason
from page_outputs import difference
from page_runs import Runs, blocks_of, quoted_of
from pages import PAGES, ROOT, fences_of, name_of

RUN = [
    page for page in PAGES if any(not reason(name_of(page), one) for block in blocks_of(page) for one in block.commands)
]
QUICK = {"docs/howto/own-trainer.md"}
PICTURE = 90


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    runs = Runs()
    yield runs
    runs.close()


def mark_of(name: str) -> Any:
    return pytest.mark.slow if name in LONG else () if name in QUICK else pytest.mark.ci


@pytest.mark.skipif(not version("megatron-core").startswith("0.19."), reason="pages show the output of 0.19")
@pytest.mark.parametrize("page", [pytest.param(one, id=name_of(one), marks=mark_of(name_of(one))) for one in RUN])
def test_page_shows_its_commands_output(page: Path, runs: Runs) -> None:
    for ran in runs.of(page):
        if ran.block.shown is not None:
            differs = difference(ran.block.shown, ran.printed)
            assert differs is None, f"{name_of(page)}:{ran.block.at}: run scripts/render_pages.py\n{differs}"


def test_python_of_the_page_about_transformers_runs(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes)).save_pretrained(tmp_path)
    batch = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 7]]
    vision_path, tokens = str(tmp_path / "pictures"), torch.tensor([[1, *[PICTURE] * 4, 2], [1, *[PICTURE] * 4, 3]])
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = sizes | {"vocab_size": 96, "num_key_value_heads": 2, "head_dim": 8, "rope_parameters": rope}
    tower = {"depth": 1, "num_heads": 2, "in_channels": 1, "patch_size": 2, "temporal_patch_size": 1}
    tower |= {"hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16}
    special = {"image_token_id": PICTURE, "video_token_id": 91, "vision_start_token_id": 92, "vision_end_token_id": 93}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=tower | {"deepstack_visual_indexes": [0]}, **special
    )
    transformers.Qwen3VLForConditionalGeneration(config).save_pretrained(vision_path)
    processed = {
        "input_ids": tokens,
        "pixel_values": torch.randn(16, 4).repeat(2, 1),  # of both rows, equal
        "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        "mm_token_type_ids": (tokens == PICTURE).int(),
    }
    names: dict[str, Any] = {"path": str(tmp_path), "batch": batch, "labels": tokens}
    names |= {"vision_path": vision_path, "processor_output": processed}
    page = ROOT / "docs/transformers.md"
    lines = page.read_text().splitlines()
    for first, language, last in fences_of(page):
        assert language == "python"
        exec("\n".join(lines[first : last - 1]), names)
    stock = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for ids, row in zip(batch, names["rows"], strict=True):
        alone = stock(torch.tensor([ids])).logits.log_softmax(-1)[0, :-1]
        expected = alone.gather(1, torch.tensor(ids[1:]).unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(row[1:], expected, rtol=1e-4, atol=1e-5)
    stock = transformers.AutoModelForImageTextToText.from_pretrained(vision_path)
    torch.testing.assert_close(names["loss"], stock(**processed, labels=tokens).loss, rtol=1e-5, atol=1e-5)


def test_exceptions_fit_commands_of_pages() -> None:
    for name, starts in NOT_RUN.items():
        commands = [one for block in blocks_of(ROOT / name) for one in block.commands]
        for start in starts:
            assert any(f"{one}\n".startswith(start) for one in commands), f"{name}: no command begins with {start}"
    for name, before in AFTER.items():
        assert f"({Path(before).name})" in (ROOT / name).read_text(), f"{name} does not name {before}"


def test_repeated_commands_are_run_on_the_other_page() -> None:
    started = {
        " ".join(shlex.split(one, comments=True))
        for block in blocks_of(ROOT / "docs/getting-started.md")
        for one in block.commands
        if not reason("docs/getting-started.md", one)
    }
    for name in NOT_RUN:
        for one in [one for block in blocks_of(ROOT / name) for one in block.commands]:
            assert reason(name, one) != REPEATED or " ".join(shlex.split(one, comments=True)) in started, one


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_output_blocks_follow_commands_that_are_run(page: Path) -> None:
    name, lines = name_of(page), page.read_text().splitlines()
    for block in blocks_of(page):
        ran = [one for one in block.commands if not reason(name, one)]
        quoted = any(lines[block.at - 1].startswith(start) for start in QUOTED.get(name, ()))
        assert block.shown is None or ran or quoted, f"{name}:{block.at} shows output that no test has printed"
    for at in quoted_of(page):
        assert any(lines[at - 1].startswith(start) for start in QUOTED.get(name, ())), f"{name}:{at} follows no command"


def test_quotations_are_on_their_pages() -> None:
    for name, starts in QUOTED.items():
        lines = (ROOT / name).read_text().splitlines()
        assert all(any(line.startswith(start) for line in lines) for start in starts), name


PRINTED = [
    "first 1",
    "step 1 | loss 2.5 | fold 6.40x | 3k tok/s",
    "step 2 | loss 2.4 | fold 6.5x | 3k tok/s",
    "saved: a",
]


@pytest.mark.parametrize(
    ("shown", "same"),
    [
        (PRINTED, True),
        (PRINTED[:3], False),
        (["...", *PRINTED[1:3], "...", "saved: a"], True),
        (["first 1", "...", "saved: a"], True),
        (["first 1", "saved: a"], False),
        (["...", PRINTED[2], PRINTED[1], "..."], False),
        (["...", "step 1 | loss 2.5 | ...", "..."], True),
        (["...", PRINTED[1]], False),
        (["...", "step 3 | loss 2.3 | ...", "..."], False),
        (["...", PRINTED[1].replace("3k", "9k"), "..."], True),  # a measured time
        (["...", PRINTED[1].replace("2.5", "2.500001"), "..."], True),
        (["...", PRINTED[1].replace("2.5", "3.5"), "..."], False),
        (["...", PRINTED[1].replace("6.40x", "6.41x"), "..."], False),
        (["...", PRINTED[1].replace("fold", "gain"), "..."], False),
    ],
)
def test_blocks_show_everything_except_their_cuts(shown: list[str], same: bool) -> None:
    assert (difference(shown, PRINTED) is None) is same
