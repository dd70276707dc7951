"""An HTTP service over one model: OpenAI's endpoints, with skills spliced and errata said to all who need them.

The way of a request: app (HTTP) -> parsing (what is asked) -> scheduler (one thread, which has the context) ->
prepare (pieces of the prompt) -> prefixes (what of it is there already) -> answering -> replies (OpenAI's shapes).
A question with `notes.ask` (from `notes ask --server`, or any client) comes by questions instead of prepare.
"""
