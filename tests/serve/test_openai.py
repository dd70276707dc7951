"""Tests OpenAI's client unchanged: answers, streams, errors, skills by an extra key or by the model's name."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from notes_cli.runtime.answering import TokenRecorder
from notes_cli.serve.parsing import parse_completion
from notes_cli.serve.replies import Reply, TokenOffsets

from .conftest import QUESTION, Json, Served, pieces, reply_text

ASKED = [{"role": "user", "content": QUESTION}]


def test_the_models_name_names_skills(served: Served) -> None:
    listed = [one.id for one in served.client.models.list()]
    assert {f"{listed[0]}@returns", f"{listed[0]}@support"} <= set(listed)
    reply = served.client.chat.completions.create(model=listed[1], messages=ASKED)
    assert reply.choices[0].message.content == "accepted"
    assert served.client.models.retrieve("tiny@returns").id == "tiny@returns"
    found = served.http.get("/v1/models/tiny@nothing")
    assert found.status_code == 404 and found.json()["error"]["code"] == "skill_not_found"


def test_a_call_with_half_a_character(served: Served) -> None:
    """Another model's arguments may be JSON with half of a surrogate pair: they stay text, and the talk goes on."""
    function = {"name": "look", "arguments": '{"x": "\\ud83d"}'}
    call = {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}
    served.chat([{"role": "user", "content": "x"}, call, {"role": "tool", "tool_call_id": "1", "content": "7"}])


def test_stops_and_probabilities(served: Served) -> None:
    """A stop string may have several tokens; each token has its probability, and they join to the answer."""
    extra = {"notes": {"splice": ["returns"]}}
    thinking = [{"role": "user", "content": f"{QUESTION} Think first."}]
    create = served.client.chat.completions.create
    whole = create(model="tiny", messages=thinking, extra_body=extra, logprobs=True, top_logprobs=3)
    text = whole.choices[0].message.content or ""
    found = whole.choices[0].logprobs
    assert found and found.content and "".join(one.token for one in found.content) == text
    assert all(len(one.top_logprobs) == 3 and one.top_logprobs[0].logprob >= one.logprob for one in found.content)
    assert all(one.logprob <= 0 and bytes(one.bytes or ()).decode() == one.token for one in found.content)
    stop = text[len(text) // 2 : len(text) // 2 + 7]
    cut = create(model="tiny", messages=thinking, extra_body=extra, stop=["nowhere", stop])
    assert cut.choices[0].message.content == text.partition(stop)[0] and cut.choices[0].finish_reason == "stop"
    assert (cut.choices[0].model_extra or {})["stop_reason"] == stop and not whole.choices[0].model_extra
    limited = create(model="tiny", messages=thinking, extra_body=extra, max_tokens=4)
    assert limited.choices[0].finish_reason == "length" and limited.usage and limited.usage.completion_tokens == 4
    chunks = list(create(model="tiny", messages=thinking, extra_body=extra, stream=True, logprobs=True, stop=stop))
    told_with = [chunk.choices[0].logprobs for chunk in chunks]
    shown = "".join(token.token for one in told_with if one for token in one.content or ())
    assert shown.startswith(text.partition(stop)[0])


def test_completions_of_raw_prompts(served: Served) -> None:
    """Choices of several prompts are in order; echo has the prompt; a prompt may be tokens."""
    create = served.client.completions.create
    both = create(model="tiny", prompt=["# Returns", "May I"], max_tokens=5, n=2, temperature=0.5, seed=3, echo=True)
    assert [one.index for one in both.choices] == [0, 1, 2, 3]
    assert [one.text[:5] for one in both.choices] == ["# Ret", "# Ret", "May I", "May I"]
    tokens = served.http.post("/tokenize", json={"content": "# Returns"}).json()["tokens"]
    alone = create(model="tiny", prompt=tokens, max_tokens=5, temperature=0.5, seed=3, logprobs=2)
    assert f"# Returns{alone.choices[0].text}" == both.choices[0].text
    assert alone.choices[0].logprobs and len(alone.choices[0].logprobs.tokens or ()) == 5
    none = create(model="tiny", prompt=tokens, max_tokens=0)  # as evaluation tools ask
    assert none.usage and none.usage.completion_tokens == 0
    streamed = create(model="tiny", prompt=["# Returns", "May I"], max_tokens=5, stream=True, echo=True)
    words: dict[int, str] = {}
    for chunk in streamed:
        for one in chunk.choices:
            words[one.index] = words.get(one.index, "") + one.text
    greedy = create(model="tiny", prompt=["# Returns", "May I"], max_tokens=5, echo=True)
    assert words == {one.index: one.text for one in greedy.choices}


def test_each_of_several_answers_ends_when_it_does(served: Served) -> None:
    """Its last chunk does not wait for longer ones, and every chunk has a choice unless usage was requested."""
    given: Any = {"model": "tiny", "prompt": "# Returns policy of", "max_tokens": 60, "n": 6, "temperature": 12.0}
    given |= {"seed": 5, "stop": ["e"], "extra_body": {"notes": {"explain": True}, "top_k": 0, "min_p": 0}}
    create = served.client.completions.create
    whole = create(**given)
    assert len({len(one.text) for one in whole.choices}) > 1, "else nothing is shown"
    chunks = list(create(**given, stream=True))
    ends = [number for number, chunk in enumerate(chunks) if chunk.choices[0].finish_reason]
    assert len(ends) == 6 and ends[-1] == len(chunks) - 1 and ends[0] < len(chunks) - 7
    assert [bool((chunk.model_extra or {}).get("notes")) for chunk in chunks] == [False] * ends[-1] + [True]


def test_a_bias(served: Served) -> None:
    create = served.client.completions.create
    tokens = served.http.post("/tokenize", json={"content": " z"}).json()["tokens"]
    given = {"model": "tiny", "prompt": "# Returns", "max_tokens": 6}
    plain = create(**given, logprobs=0)  # type: ignore[call-overload]
    first = served.http.post("/tokenize", json={"content": plain.choices[0].logprobs.tokens[0]}).json()["tokens"]
    assert len(first) == 1
    other = create(**given, logit_bias={str(first[0]): -100})  # type: ignore[call-overload]
    assert other.choices[0].text[:1] != plain.choices[0].text[:1]
    for sampling in ({}, {"temperature": 1, "seed": 3}):
        forced = create(**given, logit_bias={str(tokens[-1]): 100}, **sampling)  # type: ignore[call-overload]
        assert forced.choices[0].text.replace(" ", "") == "z" * 6
    for wrong in ({"-1": 1}, {"999999": 1}, {"5": 101}, {"x": 1}, {"5": "1"}, [5], {str(n): 1 for n in range(1025)}):
        for notes in ({}, {"session": "biased"}):
            body = {"messages": ASKED, "logit_bias": wrong, "notes": notes}
            found = served.http.post("/v1/chat/completions", json=body)
            assert found.status_code == 400 and "logit_bias" in found.json()["error"]["param"], found.text


def test_a_session_tells_log_probabilities(served: Served) -> None:
    """Of its answer's tokens, as without a session; parameters that a session does not have are refused by name."""
    found = []
    for notes in ({}, {"session": "likely"}):
        choice = served.chat(ASKED, logprobs=True, top_logprobs=2, notes=notes, max_tokens=8)["choices"][0]
        tokens = choice["logprobs"]["content"]
        assert "".join(one["token"] for one in tokens).strip() == choice["message"]["content"]
        assert tokens and all(len(one["top_logprobs"]) == 2 for one in tokens)
        found.append([(one["token"], pytest.approx(one["logprob"], abs=1e-3)) for one in tokens])
    assert found[0] == found[1]
    for name, given in (("n", {"n": 2}), ("stop", {"stop": "x"})):
        assert served.chat(ASKED, 400, notes={"session": "likely"}, **given)["param"] == name
    assert "has begun" in served.chat(ASKED, 400, notes={"session": "likely", "exact": True})["message"]
    assert served.chat([*ASKED, {"role": "assistant", "content": "gold"}, *ASKED], 400, notes={"session": "likely"})


def test_an_answer_that_ends_a_chain_of_thought_is_cut_as_any(served: Served) -> None:
    """It begins in the last tokens of the reasoning: stops and max_tokens apply to it, too."""
    thinking: Json = {"reasoning_effort": "low", "notes": {"splice": ["returns"]}}
    whole = reply_text(served.chat(ASKED, **thinking))
    stopped = served.chat(ASKED, stop=whole[2:4], **thinking)["choices"][0]
    assert (stopped["message"]["content"], stopped["finish_reason"]) == (whole[:2], "stop")
    assert stopped["stop_reason"] == whole[2:4]
    cut = served.chat(ASKED, max_tokens=0, **thinking)["choices"][0]
    assert (cut["message"]["content"] or "", cut["finish_reason"]) == ("", "length")
    usage = served.chat(ASKED, grammar='root ::= "free"', **thinking)["usage"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] <= usage["completion_tokens"]


def test_every_seed_is_one(served: Served) -> None:
    """llama.cpp takes the largest for a random one."""
    ask = {"prompt": "The date is", "temperature": 1.5, "max_tokens": 6, "n": 2}
    for seed in (2**32 - 1, 2**32 - 2):
        replies = [served.http.post("/v1/completions", json={**ask, "seed": seed}).json()["choices"] for _ in range(4)]
        assert all([one["text"] for one in reply] == [one["text"] for one in replies[0]] for reply in replies)


class Spelling:
    """A model whose tokens are these bytes."""

    def __init__(self, *tokens: bytes) -> None:
        self.tokens = tokens

    def token_bytes(self, token: int, *, special: bool = False) -> bytes:
        return self.tokens[token]


OFFSETS: list[tuple[list[bytes], list[int]]] = [
    ([b"a", b"bc", b"d"], [0, 1, 3]),
    (["é".encode()[:1], "é".encode()[1:], b"x"], [0, 0, 1]),
    (["😀".encode()[:1], "😀".encode()[1:2], "😀".encode()[2:] + b"!", b"?"], [0, 0, 0, 2]),
    ([b"a\xe6", b"\xbc", b"\xa2\xe5", b"\xad\x97", b"."], [0, 1, 1, 2, 3]),  # two characters in four tokens
    ([b"e", b"\xcc", b"\x81", b"x"], [0, 1, 1, 2]),
    ([b"\xf0\x9f", b"ab", b"c"], [0, 1, 3]),  # never completed: one U+FFFD
    ([b"\xe2", b"\xe2", b"\x82\xac", b"x"], [0, 1, 1, 2]),
    ([b"\x80", b"\xbf\xbf", b"a"], [0, 1, 3]),
    ([b"a", b"", b"b"], [0, 1, 1]),  # a control token is not in the text
]


def test_offsets_of_tokens() -> None:
    """In characters of the text; a part of a character has the character's offset."""
    for tokens, offsets in OFFSETS:
        for start in (0, 7):
            places = TokenOffsets(start)
            assert [places.next(token) - start for token in tokens] == offsets, tokens


def test_alternatives_that_are_parts_of_characters_stay_apart() -> None:
    """By their bytes, as in OpenAI's completions; of two with equal bytes the likelier one counts."""
    logits = np.array([5.0, 4.0, 3.0, 2.0, 1.0], np.float32)
    recorder = TokenRecorder(Spelling(b"\xf0\x9f", b"\xf0", "é".encode(), b"\xf0", b"x"), 4)  # type: ignore[arg-type]
    recorder.chosen(1, logits)
    asked = parse_completion({"prompt": "?", "logprobs": 4})[0]
    found = Reply(asked, "tiny")._completion_logprobs(0, recorder.take())
    assert found and found["tokens"] == [r"bytes:\xf0"]
    (likely,) = found["top_logprobs"]
    assert list(likely) == [r"bytes:\xf0\x9f", r"bytes:\xf0", "é"]
    assert likely[r"bytes:\xf0"] == found["token_logprobs"][0]


@pytest.mark.parametrize("stream", [False, True])
def test_offsets_of_an_answer(served: Served, stream: bool) -> None:
    """Whole and in chunks, after an echoed prompt, where characters have several tokens: a token is at its offset."""
    parts = served.http.post("/tokenize", json={"content": "é😀漢x"}).json()["tokens"]
    bias = {str(token): 100 for token in parts}
    given = {"prompt": "# Returns é", "max_tokens": 40, "temperature": 2, "seed": 4, "logprobs": 3, "echo": True}
    reply = served.http.post("/v1/completions", json={**given, "logit_bias": bias, "stream": stream})
    assert reply.status_code == 200, reply.text
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")] if stream else [reply.text]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    text = "".join(choice["text"] for choice in choices)
    found = [choice["logprobs"] for choice in choices if choice["logprobs"]]
    tokens = [(token, at) for one in found for token, at in zip(one["tokens"], one["text_offset"], strict=True)]
    assert len(tokens) == 40 and any(token.startswith("bytes:") for token, _ in tokens)
    assert all(text.startswith(token, at) for token, at in tokens if not token.startswith("bytes:"))
    assert [at for _, at in tokens] == sorted(at for _, at in tokens) and tokens[0][1] == len("# Returns é")


# A last message of the assistant is the beginning of the answer.

THINK: Json = {"role": "user", "content": f"{QUESTION} Think first."}
NOTES: Json = {"splice": ["returns"], "errata": {"date": "2026-07-01"}}
LAST: Json = {"role": "assistant", "content": "The date"}


def answer(text: str) -> Json:
    return {"role": "assistant", "content": text}


def test_the_reply_is_the_rest_of_the_answer(served: Served) -> None:
    """With skills and corrections, whole and streamed, wherever the answer is cut; confirmed by vLLM's keys or not."""
    whole = reply_text(served.chat([THINK], notes=NOTES))
    assert whole == "The date is 2026-07-01. So the return is refused."
    for end, keys in (
        (len("The"), {}),
        (len("The date is"), {"add_generation_prompt": False}),
        (whole.index(" return"), {"continue_final_message": True, "add_generation_prompt": False}),
        (len(whole) - 1, {"continue_final_message": True}),
    ):
        begun = [THINK, answer(whole[:end])]
        reply = served.chat(begun, notes=NOTES, **keys)
        assert reply_text(reply) == whole[end:] and reply["choices"][0]["finish_reason"] == "stop"
        create: Any = served.client.chat.completions.create
        chunks = create(model="tiny", messages=begun, stream=True, extra_body={"notes": NOTES, **keys})
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole[end:]


def test_a_prefilled_answer_is_an_answer_in_the_next_turn(served: Served) -> None:
    """Its tokens are reused, and errata are where they were."""
    begun, notes = "The date is 2026-07-01.", {**NOTES, "explain": True, "cache_salt": "own"}
    first = served.chat([THINK, answer(begun)], notes=notes)
    talk = [THINK, answer(begun + reply_text(first)), {"role": "user", "content": QUESTION}]
    second = served.chat(talk, notes=notes)
    live = sum(count for _, how, count in pieces(second) if how == "live")
    assert live >= first["usage"]["prompt_tokens"] and pieces(second)[0][1] == "live"
    errata = [[kind for kind, _, _ in pieces(one)].count("erratum") for one in (first, second)]
    assert errata[0] == errata[1]


def test_an_empty_one_begins_nothing(served: Served) -> None:
    whole = served.chat([THINK], notes=NOTES)
    for content in ("", None, []):
        reply = served.chat([THINK, {**LAST, "content": content}], notes=NOTES)
        assert reply_text(reply) == reply_text(whole)
        assert reply["usage"]["prompt_tokens"] == whole["usage"]["prompt_tokens"]
