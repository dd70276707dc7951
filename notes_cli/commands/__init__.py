"""The subcommands of `notes`, a module each: parse, call, print. No model logic."""
