from __future__ import annotations

from collections.abc import Iterator

import pytest
from fault_cases import Case, Runner
from fault_inputs import write_bases


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Runs cases from good inputs, among them the checkpoint of a run."""
    folder = tmp_path_factory.mktemp("faults")
    bases = folder / "bases"
    write_bases(bases)
    runner = Runner(folder, bases)
    save = ("train", "recipe.yaml", f"checkpoint.save={bases / 'checkpoint' / 'runs'}")
    made = runner.run(Case(name="", reader="", arguments=save, base="plain", is_valid=True), limit_s=300)
    assert made.status == 0, made.stderr
    for file in (bases / "plain").iterdir():
        (bases / "checkpoint" / file.name).write_bytes(file.read_bytes())
    yield runner
    runner.close()
