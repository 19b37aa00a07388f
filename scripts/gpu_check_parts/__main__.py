"""Command line of ``scripts/gpu_check``."""

from __future__ import annotations

import sys

from gpu_check_parts.check import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
