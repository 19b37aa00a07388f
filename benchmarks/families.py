#!/usr/bin/env python3
"""Measure families of Hugging Face models against transformers: tiny random models, on a CPU.

    OMP_NUM_THREADS=1 benchmarks/families.py      # writes benchmarks/results/families.json; takes minutes

Needs the packages of requirements/bridge.txt. Megatron-Core's own layers run unchanged. TransformerEngine's layers run
in plain torch, from tests/peers/te_stand_in.py, in a separate process, because Megatron-Core looks for
TransformerEngine only once, when it is imported.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
LAYERS = ("local", "transformer_engine")
FOLDERS = [str(ROOT), *(str(ROOT / "tests" / name) for name in ("peers", "."))]
sys.path[:0] = FOLDERS
# Of the server that ranks are forked from, too.
os.environ["PYTHONPATH"] = os.pathsep.join(FOLDERS)


def measure(layers: str, families: list[str], *, with_layouts: bool) -> list[dict[str, Any]]:
    """Return the errors of each family, or the reason why it is not supported."""
    if layers == "transformer_engine":
        import te_stand_in  # noqa: F401
    import bridge_loaded  # noqa: F401
    from harness import forks
    from hf_folders import FAMILIES
    from hf_jobs import OWN_LAYERS, PP2, REFERENCE, TP2, TP2_SP, check_layout, errors_of

    first = ["te_stand_in"] if layers == "transformer_engine" else []
    forks.PRELOADED[:] = [*first, *forks.PRELOADED, "bridge_loaded"]
    options = (REFERENCE, f"model.transformer_impl={layers}")
    results = []
    for family in families or FAMILIES:
        result: dict[str, Any] = {"family": family, "layers": layers}
        with tempfile.TemporaryDirectory() as name:
            try:
                result |= errors_of(family, Path(name), *options)
            except RuntimeError as error:
                result["refused"] = str(error).replace(f"{name}/", "")
        layouts = {"TP=2": TP2 if family in OWN_LAYERS else TP2_SP, "PP=2": PP2} if with_layouts else {}
        verify = () if layers == "local" else ("verify.enabled=false",)  # attention without a tree has no stand-in
        for layout, settings in layouts.items() if "logprob" in result else ():
            with tempfile.TemporaryDirectory() as name:
                try:
                    result[layout] = check_layout(family, Path(name), *options, *settings, *verify)
                except (AssertionError, RuntimeError) as error:
                    lines = str(error).replace(f"{name}/", "").strip().splitlines()
                    result[layout] = [lines[-1], *(line for line in lines if "rror: " in line)][-1]
        if with_layouts and "logprob" in result and FAMILIES[family].has_experts:
            result["EP=2"] = experts_over_ranks(family, layers)
        print(json.dumps(result), file=sys.stderr)
        results.append(result)
    return results


def experts_over_ranks(family: str, layers: str) -> bool:
    """Return whether a folder loaded with its experts on two ranks is exported with the same bits."""
    from harness.worlds import Layout, world
    from hf_jobs import assert_same_folder, write_job
    from hf_ranks import export_again

    with tempfile.TemporaryDirectory() as name:
        _, source, _ = write_job(Path(name), family, max_shard_size="100KB")
        target = Path(name) / "exported"
        world(2).run(export_again, str(source), str(target), layers, 2, layout=Layout(ep=2))
        assert_same_folder(target, source)
    return True


def main() -> None:
    """Run this script again for each kind of layers, or measure one kind."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", choices=LAYERS, help="measure only these layers")
    parser.add_argument("--family", action="append", default=[], help="measure only this family; can be repeated")
    parser.add_argument("--no-layouts", action="store_true", help="measure in one process only")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results" / "families.json")
    options = parser.parse_args()
    if options.layers:
        results = measure(options.layers, options.family, with_layouts=not options.no_layouts)
    else:
        results = []
        for layers in LAYERS:
            with tempfile.NamedTemporaryFile() as file:
                arguments = [*sys.argv[1:], "--layers", layers, "--output", file.name]
                subprocess.run([sys.executable, __file__, *arguments], check=True)
                results += json.loads(Path(file.name).read_text())["results"]
    from importlib.metadata import version

    versions = {name: version(name) for name in ("torch", "megatron-core", "megatron-bridge", "transformers")}
    options.output.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
