"""Runs a model: its context, the user's library, compiling, prompt assembly and answering."""
