"""Text before it becomes tokens: skills, errata, chat templates, conversations. Pure: no model, no command line."""
