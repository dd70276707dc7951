"""Where `notes` begins, as does `python -m notes_cli`: signals are taken before anything else is loaded."""

from notes_cli import stops

stops.install()


def main() -> None:
    """Run `notes` and exit."""
    from notes_cli import cli

    cli.main()


if __name__ == "__main__":
    main()
