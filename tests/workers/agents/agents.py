"""Agents of the tests, which use only OpenAI's client."""

# mypy: ignore-errors

from __future__ import annotations

import asyncio
import base64
import inspect
import os
import pathlib
import re
import socket
import time

import httpx
import openai
import pytest


def any_of_these(row, **arguments):
    """Run the agent that the row names; agents share a process that has loaded the client."""
    agent = globals()[row["agent"]]
    arguments = {"row": row, **arguments, **row["arguments"]}
    names = inspect.signature(agent).parameters
    return agent(**{name: arguments[name] for name in arguments if name in names})


def sends_its_pid(row):
    """Send one request with the process's number."""
    messages = [{"role": "user", "content": str(os.getpid())}]
    openai.OpenAI().chat.completions.create(messages=messages, **SHORT)
    return 1.0


ASK = [{"role": "user", "content": "go"}]
SHORT = {"model": "any", "max_tokens": 6}


def counts(row):
    """Play three turns, each followed by its number."""
    client, messages = openai.OpenAI(), list(ASK)
    for number in range(3):
        message = client.chat.completions.create(messages=messages, **SHORT).choices[0].message
        messages += [message, {"role": "user", "content": str(number + 1)}]
    return 3.0


async def counts_async(row, base_url, api_key):
    """Play the same turns by the asynchronous client and plain dicts."""
    client, messages = openai.AsyncOpenAI(base_url=base_url, api_key=api_key), list(ASK)
    for number in range(3):
        reply = await client.chat.completions.create(messages=messages, **SHORT)
        messages += [
            {"role": "assistant", "content": reply.choices[0].message.content},
            {"role": "user", "content": [{"type": "text", "text": str(number + 1)}]},
        ]
        await asyncio.sleep(0)
    return 3


def with_package(row, base_url, api_key):
    """Run an agent that a page prints, on the prompt of these tests."""
    agent = load_from_page("api_clients.md", f"def {row['function']}(")
    return agent({"prompt": ASK}, base_url, api_key)


def load_from_page(page, start):
    """Return the function or class that begins with `start` in a block of a page of the docs."""
    text = (pathlib.Path(__file__).parents[3] / "docs" / page).read_text("utf-8")
    [block] = [b for b in re.findall(r"```python\n(.*?)```", text, re.S) if start in b]
    space = {}
    exec(block, space)
    return space[re.search(r"\w+", start.partition(" ")[2])[0]]


def streams(row):
    """Play the same turns by streams."""
    client, messages = openai.OpenAI(), list(ASK)
    for number in range(3):
        with client.chat.completions.create(messages=messages, stream=True, **SHORT) as stream:
            text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": str(number + 1)},
        ]
    return 3.0


def by_ids(row, base_url, added=4):
    """Play three turns by token ids, with two more ids after each."""
    url = base_url.removesuffix("/v1") + "/inference/v1/generate"
    ids, settings = [1, 4, 30, 5], {"max_tokens": 6, "stop_token_ids": [2], "logprobs": 1}
    for _ in range(3):
        body = {"model": "policy", "token_ids": ids, "sampling_params": settings}
        reply = httpx.post(url, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        (choice,) = reply.json()["choices"]
        sampled = choice["token_ids"]
        entries = choice["logprobs"]["content"]
        assert [entry["token"] for entry in entries] == [f"token_id:{token}" for token in sampled]
        assert all(entry["logprob"] <= 0 for entry in entries)
        ids = [*ids, *sampled, added, 5]
    return 3.0


def rewards_turns(row):
    """Reward each completion by its id."""
    client, messages, rewards = openai.OpenAI(), list(ASK), {}
    for number in range(3):
        reply = client.chat.completions.create(messages=messages, **SHORT)
        rewards[reply.id] = number + 0.5
        messages += [reply.choices[0].message, {"role": "user", "content": "x"}]
    return rewards


def never_stops(row, catches=True):
    """Send requests until one is rejected."""
    client, messages = openai.OpenAI(), list(ASK)
    try:
        while True:
            message = client.chat.completions.create(messages=messages, **SHORT).choices[0].message
            messages += [message, {"role": "user", "content": "x"}]
    except openai.BadRequestError as error:
        if not catches:
            raise
        return 0.25 if error.code in ("context_length_exceeded", None) else 0.0


def fills_branches(row, names=("ab", "b")):
    """Continue one conversation after the other until it is full; return the last one's turns."""
    client = openai.OpenAI()
    for name in names:
        messages, turns = [{"role": "user", "content": name}], 0
        try:
            while True:
                reply = client.chat.completions.create(messages=messages, model="any")
                messages += [reply.choices[0].message, {"role": "user", "content": "x"}]
                turns += 1
        except openai.BadRequestError as error:
            if error.code != "context_length_exceeded":
                raise
    return float(turns)


def compacts(row, fills_last, fails=False):
    """Begin a shorter conversation once one is full; continue it for a turn, or until it is full.

    Return 1, or fail after that.
    """
    client = openai.OpenAI()
    for content, is_filled in (("go", True), ("so", fills_last)):
        messages, is_open = [{"role": "user", "content": content}], True
        while is_open:
            try:
                reply = client.chat.completions.create(messages=messages, **SHORT)
                messages += [reply.choices[0].message, {"role": "user", "content": "x"}]
                is_open = is_filled
            except openai.BadRequestError:
                is_open = False
    return 1.0 / (not fails)


def sends_special_tokens(row):
    client, messages = openai.OpenAI(), []
    for text in ("a<eos>", "b<eos>"):
        messages.append({"role": "user", "content": text})
        reply = client.chat.completions.create(messages=messages, **SHORT)
        messages.append(reply.choices[0].message)
    return 1.0


def sets(row, name, value):
    """Set parameters that belong to the run."""
    openai.OpenAI().chat.completions.create(messages=ASK, **SHORT, **{name: value})
    return 1.0


def sends_invalid_requests(row):
    """Send requests that no server could accept, between two valid ones."""
    invalid = {"stop": 5, "tools": [{"function": {"name": "a", "parameters": 5}}]}
    client = openai.OpenAI()
    client.chat.completions.create(messages=ASK, **SHORT)
    for name, value in invalid.items():
        try:
            client.chat.completions.create(messages=ASK, **SHORT, **{name: value})
        except openai.BadRequestError:
            continue
        raise AssertionError(name)
    client.chat.completions.create(messages=ASK, **SHORT)
    return 1.0


def requests_two_choices(row):
    """Request two choices with log-probs; reward each."""
    reply = openai.OpenAI().chat.completions.create(messages=ASK, n=2, logprobs=True, **SHORT)
    if len(reply.choices) != 2 or not reply.choices[0].logprobs:
        raise RuntimeError("one choice, no log-probs")
    words = [choice.logprobs.content for choice in reply.choices]
    assert sum(map(len, words)) == reply.usage.completion_tokens
    assert all(word.logprob <= 0 for choice in words for word in choice)
    assert reply.id == reply.choices[1].id
    return {reply.choices[0].id: 0.25, reply.choices[1].id: 0.5}


def stops(row, letters):
    """Play a turn that ends with a letter, and another one."""
    client = openai.OpenAI()
    reply = client.chat.completions.create(messages=ASK, stop=list(letters), **SHORT)
    message = reply.choices[0].message
    assert not {*message.content} & {*letters}
    messages = [*ASK, message, {"role": "user", "content": "x"}]
    client.chat.completions.create(messages=messages, **SHORT)
    return 1.0


def sends_a_long_prompt(row):
    """Send a prompt that does not fit, then one that does."""
    client, code = openai.OpenAI(), None
    try:
        client.chat.completions.create(messages=[{**ASK[0], "content": "x" * 99}], **SHORT)
    except openai.BadRequestError as error:
        code = error.code
    client.chat.completions.create(messages=ASK, **SHORT)
    return float(code == "context_length_exceeded")


def rewrites(row):
    """Leave the first exchange out of the second request, and continue from there."""
    client = openai.OpenAI()
    client.chat.completions.create(messages=ASK, **SHORT)
    messages = [{"role": "user", "content": "other"}]
    reply = client.chat.completions.create(messages=messages, **SHORT)
    messages += [reply.choices[0].message, {"role": "user", "content": "more"}]
    client.chat.completions.create(messages=messages, **SHORT)
    return 1.0


def looks(row, turns, forgets=False):
    """Show the images of each turn; with `forgets`, the last turn begins a new chat."""
    client, messages = openai.OpenAI(), []
    for number, paths in enumerate(turns):
        parts = [{"type": "text", "text": "see "}, *map(image_part, paths)]
        messages = [] if forgets and number == len(turns) - 1 else messages
        messages.append({"role": "user", "content": parts})
        message = client.chat.completions.create(messages=messages, **SHORT).choices[0].message
        messages.append({"role": "assistant", "content": message.content})
    return 1.0


def swaps(row, first, second):
    """Continue a chat whose first image was exchanged."""
    client, messages = openai.OpenAI(), [{"role": "user", "content": [image_part(first)]}]
    message = client.chat.completions.create(messages=messages, **SHORT).choices[0].message
    messages[0] = {"role": "user", "content": [image_part(second)]}
    messages += [{"role": "assistant", "content": message.content}, *ASK]
    client.chat.completions.create(messages=messages, **SHORT)
    return 1.0


def image_part(path):
    data = base64.b64encode(pathlib.Path(path).read_bytes()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


def looks_at_its_prompt(row):
    """Send the row's prompt as it is."""
    openai.OpenAI().chat.completions.create(messages=row["prompt"], **SHORT)
    return 1.0


def sends_image_urls(row, urls):
    """Return without an error once each URL is rejected in words."""
    client = openai.OpenAI()
    client.chat.completions.create(messages=ASK, **SHORT)
    for url, words in urls:
        parts = [{"type": "image_url", "image_url": {"url": url}}]
        with pytest.raises(openai.BadRequestError, match=re.escape(words)):
            client.chat.completions.create(messages=[{"role": "user", "content": parts}], **SHORT)
    return 1.0


def raises(row):
    openai.OpenAI().chat.completions.create(messages=ASK, **SHORT)
    raise RuntimeError("out of order")


def exits(row):
    openai.OpenAI().chat.completions.create(messages=ASK, **SHORT)
    raise SystemExit(3)


def hangs(row):
    openai.OpenAI().chat.completions.create(messages=ASK, **SHORT)
    time.sleep(60)


def returns(row, value=None):
    openai.OpenAI().chat.completions.create(messages=ASK, **SHORT)
    return float(value) if value == "nan" else value


def is_silent(row):
    return 1.0


def draws(row, rng):
    """Draw from the agent's own and the prompt's random numbers."""
    import random

    openai.OpenAI().chat.completions.create(
        messages=[{"role": "user", "content": str(rng.integers(1000))}], **SHORT
    )
    return float(random.random())


def needs(row, something): ...


def plain(row): ...


def repeats(row):
    """Send the same request three times, and another one."""
    create = openai.OpenAI().chat.completions.create
    ids = {create(messages=ASK, **SHORT).id for _ in range(3)}
    create(messages=[{"role": "user", "content": "other"}], **SHORT)
    return float(len(ids))


def negotiates(row):
    """Two players, one of whom sends two requests; both are rewarded by turns and as a whole."""
    create = openai.OpenAI().chat.completions.create
    first = create(messages=ASK, model="buyer", max_tokens=6)
    create(messages=[{"role": "user", "content": "you"}], model="seller", max_tokens=6)
    messages = [*ASK, first.choices[0].message, {"role": "user", "content": "more"}]
    create(messages=messages, model="buyer", max_tokens=6)
    try:
        create(messages=ASK, model="red", max_tokens=6)
    except openai.NotFoundError:
        return {"buyer": 1.0, "seller": -1.0, first.id: 0.25}


negotiates.players = ("buyer", "seller")


def waits_for_others(row, base_url, api_key):
    """Write the key to a file, and wait until other programs have sent requests.

    Return the number of Unix sockets that the sandbox lets it create.
    """
    folder = row["folder"]
    with open(os.path.join(folder, "key.part"), "w") as file:
        file.write(f"{base_url} {api_key}")
    os.rename(os.path.join(folder, "key.part"), os.path.join(folder, "key"))
    while not os.path.exists(os.path.join(folder, "done")):
        time.sleep(0.02)
    try:
        socket.socket(socket.AF_UNIX).close()
    except PermissionError:
        return 0.0
    return 1.0
