"""Where `notes` begins, as does `python -m notes_cli`: signals are taken before anything else is loaded."""

import os

from notes_cli import stops

stops.install()


def main() -> None:
    """Run `notes` and exit."""
    # numpy comes with OpenBLAS, which starts a thread for each core where it is loaded, and these turn in circles for a
    # while: 60 ms of both cores of a small machine. Nothing here multiplies large matrices in Python.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    from notes_cli import cli

    cli.main()


if __name__ == "__main__":
    main()
