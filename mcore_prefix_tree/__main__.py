"""``python -m mcore_prefix_tree``, for ``torchrun -m mcore_prefix_tree``: the same as ``mcore-prefix-tree``."""

import signal


def main() -> None:
    """Run the command line."""
    # Until a command takes over, Ctrl-C ends the process silently. Python's own handler would print a traceback
    # out of an import, and imports take their time.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from mcore_prefix_tree.cli.main import app

    app(prog_name="mcore-prefix-tree")


if __name__ == "__main__":
    main()
