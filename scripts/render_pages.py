#!/usr/bin/env python3
"""Run the commands of README and docs/, and write their output into the blocks below them.

The commands of a page run in order, in a new folder like a reader's; tests/docs/page_runs.py reads and shortens blocks.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "docs")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", type=Path, help="pages to run; all by default")
    given = parser.parse_args().pages

    from page_runs import Runs, render
    from pages import PAGES, name_of

    runs = Runs()
    try:
        for page in [path.resolve() for path in given] or PAGES:
            before, after = page.read_text(), render(page, runs)
            page.write_text(after)
            print(f"{name_of(page)}: {'unchanged' if before == after else 'rewritten'}", flush=True)
    finally:
        runs.close()


if __name__ == "__main__":
    main()
