"""Text processing before tokenisation: skills, errata, chat templates, conversations, grammars. Needs no model."""
