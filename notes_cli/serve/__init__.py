"""Serves one model over HTTP: OpenAI's endpoints, with skills spliced and errata added.

A request passes through: app (endpoints), parsing (JSON to ChatRequest), prepare (prompt and tokens), scheduler
(admission), answer_tasks (prefill, decode), event_stream and replies (JSON).
"""
