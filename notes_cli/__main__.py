"""Entry point of `notes` and `python -m notes_cli`: installs signal handlers before anything else is imported."""

import os

from notes_cli import signals

signals.install()


def main() -> None:
    """Run `notes` and exit."""
    # numpy's OpenBLAS starts a busy-waiting thread per core on import: 60 ms on two cores. Python code here multiplies
    # no large matrices.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from notes_cli import cli

    cli.main()


if __name__ == "__main__":
    main()
