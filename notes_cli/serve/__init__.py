"""An HTTP service over one model: OpenAI's endpoints, with skills spliced and errata said to all who need them.

The way of a request: app (HTTP) -> parsing (what is asked) -> scheduler (one thread, which has the context) ->
prepare (pieces of the prompt) -> prefixes (what of it is there already) -> answering -> replies (OpenAI's shapes).
What `notes ask` of the same user asks comes by own instead of parsing and prepare, and goes back as ownevents.
"""
