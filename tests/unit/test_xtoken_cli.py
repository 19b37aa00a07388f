"""The xtoken commands: preparing projections, and looking at an alignment."""

import re

import pytest
import torch
from harness.commands import write_rows
from harness.tokenizer_folders import CHATML, make_folder
from typer.testing import CliRunner

from mcore_prefix_tree.cli.main import app
from mcore_prefix_tree.data import load_tokenizer
from mcore_prefix_tree.xtoken.projection import trim
from mcore_prefix_tree.xtoken.projection_build import Vocabularies
from mcore_prefix_tree.xtoken.projection_file import read_projection

MESSAGES = [
    {"role": "user", "content": "find parcel 7"},
    {"role": "assistant", "content": "look up the parcel\n"},
    {"role": "user", "content": "sorry"},
    {"role": "assistant", "content": "it is [bold]lost[/bold]"},
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    student = make_folder(tmp_path_factory.mktemp("student"), CHATML)
    teacher = make_folder(tmp_path_factory.mktemp("teacher"), CHATML, prepend_space=True, joins=("parcel",))
    return {"--student": student, "--teacher": teacher}


def xtoken(command, *arguments, folders, **more):
    options = [part for name, folder in folders.items() for part in (name, folder)]
    return CliRunner().invoke(app, ["xtoken", command, *map(str, arguments), *options], **more)


def done(*arguments, **more):
    result = xtoken(*arguments, **more)
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments, **more):
    result = xtoken(*arguments, **more)
    assert result.exit_code == 2
    return result.stderr


@pytest.fixture
def built(tmp_path, folders):
    done("build-projection", tmp_path / "built.safetensors", folders=folders)
    return tmp_path / "built.safetensors"


def test_projection_is_built_mapped_and_trimmed(tmp_path, folders, built):
    vocabularies = Vocabularies(*(load_tokenizer(folder) for folder in folders.values()))
    sides = {"student": vocabularies.student, "teacher": vocabularies.teacher}
    exact, trimmed = tmp_path / "exact.safetensors", tmp_path / "trimmed.pt"
    told = done("apply-exact-map", built, "--output", exact, folders=folders).stdout
    done("trim", exact, "--output", trimmed, "--top-k", 4, folders=folders)
    expected = trim(vocabularies.exact_map(vocabularies.build()), 4)
    for path in (trimmed, exact):
        found = trim(read_projection(path, **sides), 4)
        assert found.columns.tolist() == expected.columns.tolist()
        torch.testing.assert_close(torch.tensor(found.weights), torch.tensor(expected.weights))
    mapped, rows, alone = re.match(
        rf"{exact}: (\d+) of (\d+) student tokens are mapped, (\d+) of them to", told
    ).groups()
    assert int(rows) == vocabularies.student.vocab_size
    assert (int(mapped), int(alone)) == ((expected.columns[:, 0] >= 0).sum(), (expected.weights[:, 0] == 1).sum())


def test_options_of_the_build_are_used(tmp_path, folders, built):
    path = tmp_path / "other.pt"
    options = ["--top-k", 2, "--tokens-kept", 1, "--no-reverse", "--special-similarity", 2]
    done("build-projection", path, *options, folders=folders)
    content = torch.load(path, weights_only=True)
    assert ((content["indices"] >= 0).sum(dim=1) <= 1).all()
    assert set(content["likelihoods"].unique().tolist()) == {0.0, 1.0}


def test_mistakes_are_one_sentence(tmp_path, folders, built):
    swapped = dict(zip(folders, reversed(folders.values()), strict=True))
    reason = refused("trim", built, "--output", tmp_path / "t.pt", "--top-k", 2, folders=swapped)
    assert reason.startswith(f"error: {built}: was built for another student's tokenizer than '{folders['--teacher']}'")
    assert not (tmp_path / "t.pt").exists()
    reason = refused("apply-exact-map", built, "--output", built, folders=folders)
    assert reason == f"error: --output {built}: is read by this command, which would replace it; name another file\n"
    reason = refused("build-projection", tmp_path / "no" / "w.pt", folders=folders)
    assert "its folder does not exist" in reason
    built.write_bytes(built.read_bytes()[:-1])
    reason = refused("trim", built, "--output", tmp_path / "t.pt", "--top-k", 2, folders=folders)
    assert reason.startswith(f"error: {built}: is damaged or no projection; ")
    assert reason.count("\n") == 1
    assert "--student-chat-template-kwargs: '[' is not JSON" in refused(
        "build-projection", tmp_path / "w.pt", "--student-chat-template-kwargs", "[", folders=folders
    )


@pytest.fixture
def chats(tmp_path):
    return write_rows(tmp_path / "chats.jsonl", ({"messages": MESSAGES[:length]} for length in (4, 2, 1)))


def test_alignment_is_shown_as_a_table(folders, chats):
    told = done("inspect-alignment", chats, "--chunks", 2, "--samples", 2, folders=folders).stdout
    first, second = told.split(f"{chats}:2: ")
    assert re.search(rf"{chats}:1: \d+ student tokens, \d+ teacher tokens, (\d+) chunks", first)
    assert "more chunks\n" in first
    assert re.search(r"(\d+) of \1 scored student tokens are aligned: ", first)
    shown = re.search(r"^ +0 +\d+  \|(.*?)\| +\d+  \|(.*?)\| +1$", second, re.MULTILINE)
    assert shown[1].replace("|", "") == shown[2].replace("|", "") == "look"


def test_alignment_escapes_unprintable_text(folders, chats):
    told = done("inspect-alignment", chats, "--chunks", 999, folders=folders, env={"COLUMNS": "200"}).stdout
    assert "|\\n|" in told
    assert "[bold]" in "".join(re.findall(r"^ +\d+ +\d+  \|(.*?)\|  ", told, re.MULTILINE)).replace("|", "")
    assert "<|im_end|>" in told


@pytest.mark.parametrize("rendering", ["own", "student"])
@pytest.mark.parametrize("aligner", ["bytes", "dynamic"])
def test_ways_to_align_agree_on_ordinary_text(folders, chats, rendering, aligner):
    options = ["--rendering", rendering, "--aligner", aligner, "--expand-turns", "--samples", 2]
    told = done("inspect-alignment", chats, *options, folders=folders).stdout
    assert f"{chats}:1 turn 1: " in told
    assert len(re.findall(r"(\d+) of \1 scored student tokens are aligned", told)) == 2


def test_bad_samples_end_or_are_skipped(folders, chats):
    reason = refused("inspect-alignment", chats, "--samples", 9, folders=folders)
    assert f"{chats}:3: field 'messages' has no assistant message" in reason
    result = done("inspect-alignment", chats, "--samples", 9, "--on-error", "skip", folders=folders)
    assert "skipped 1 bad sample (1 malformed)" in result.stderr
