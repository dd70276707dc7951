"""A model at work: its context and the user's library, compiling, assembling a prompt, answering."""
