"""The work that commands share: a workspace of model, context and library; compiling; laying out a prompt."""
