"""Table of the upstream names that this package relies on and an installation lacks."""

from __future__ import annotations

import json
import warnings

from mcore_prefix_tree.cli.boundary import quiet_upstream


def show_installed(megatron_lm_path: str | None, *, as_json: bool) -> bool:
    """Print the upstream names that each room lacks or finds different; return whether nothing is missing.

    ``megatron_lm_path`` is a checkout to check with its own megatron-core; None checks only the installed
    megatron-core.

    Raises:
        ValueError: the path holds no Megatron-LM, or its ``pretrain()`` has an unknown form.
        ImportError: the seam, without which nothing else can be checked, lacks something.
    """
    quiet_upstream()
    if megatron_lm_path is not None:
        from mcore_prefix_tree.pretrain_gpt import use_megatron_lm

        use_megatron_lm(megatron_lm_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first line says whether a test has seen this version
        from mcore_prefix_tree.mcore import compat

        missing = compat.missing_by_room(megatron_lm=megatron_lm_path is not None)
        whole = not any(missing.values())
        if whole and megatron_lm_path is not None:
            from mcore_prefix_tree.mcore.megatron_lm.pretrain_forms import check_megatron_lm

            check_megatron_lm()
    version, folder = compat.installed_version(), str(compat.installed_folder())
    tested = compat.is_tested(version)
    if as_json:
        print(json.dumps({"megatron-core": version, "path": folder, "tested": tested, "missing": missing}))
        return whole
    from rich.console import Console

    from mcore_prefix_tree.cli.terminal import grid, say_line

    console = Console()
    said = "a tested series" if tested else f"which no test has seen; {compat.SUPPORTED}"
    say_line(console, f"megatron-core {version} in {folder}, {said}")
    table = grid(("room", "missing or different"))
    for room, names in missing.items():
        table.add_row(room, str(len(names)))
    console.print(table)
    for name in (one for names in missing.values() for one in names):
        say_line(console, f"missing or different: {name}")
    return whole
