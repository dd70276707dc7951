"""Text before tokens: skill files, errata, chat templates, the order of a prompt. Pure: no model, no
command line."""
