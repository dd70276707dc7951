"""Serves one model over HTTP: OpenAI's endpoints, with skills spliced and errata added.

A request passes through: app (endpoints), parsing (JSON to ChatRequest), prepare or questions (prompt and tokens),
scheduler and kv_budget (admission), answer_tasks and generation (prefill, decode), event_stream and replies (JSON).
"""
