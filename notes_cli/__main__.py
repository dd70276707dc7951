"""`python -m notes_cli` is `notes`."""

from notes_cli.cli import main

main()
