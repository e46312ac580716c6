"""usage: verl-like chat MODEL [--system TEXT] [--max-tokens N] [--temperature T]
           [--seed N]

Talks to a model:

  verl-like chat runs/verl_like/ppo
  echo "What is 3 + 4?" | verl-like chat runs/verl_like/ppo --max-tokens 4

MODEL is a model folder, a name on the Hugging Face hub, a run folder (its
trained model), or a global_step_N in one. On a terminal it asks for messages
(/new restarts, Ctrl-D ends) and shows the replies while they are generated.
From a pipe the whole input is one message, and only the reply is printed. A
line /image PATH before a message puts an image at its beginning:

  (echo /image a.png; echo "What is it?") | verl-like chat runs/verl_like/ppo

  --system TEXT     the system message
  --max-tokens N    most tokens of a reply (default: 512)
  --temperature T   0 (default): always the likeliest token; 1: as in training
  --seed N          an equal seed gives equal samples (default: random)

usage: verl-like chat MODEL --environment FILE.py:CLASS
           [--tools FILE.py:FUNCTION ...] [--kwargs JSON] [--row JSON]
           [--max-turns N]

This form plays one trajectory. Press Enter for a turn of the model, or write a
turn yourself. From a pipe, each line is a turn, then the model continues by
itself. Observations and rewards are shown. --seed selects another trajectory.

  --environment FILE.py:CLASS  play in this environment
  --tools FILE.py:FUNCTION     functions that the policy can call
  --kwargs JSON                arguments of the environment
  --row JSON                   the prompt's row
  --max-turns N                most turns of the policy
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from trainer.cli.check_environment import json_object, reject_ids, reply_text
from trainer.data.media import ReadColumns, read_media
from trainer.data.prompt_tokens import render_messages
from trainer.data.prompts import load_tokenizer
from trainer.run_folder.saved_model import find_loadable
from verl_like.errors import ConfigError
from verl_like.terminal import usage_text
from workers.agents.calls import forms_of
from workers.agents.chat import Message, TurnRenderer, with_observation, with_refs
from workers.agents.host import EnvironmentHost
from workers.agents.load_environment import EnvironmentSpec, full_path
from workers.chats import images_of
from workers.models.folder import UNREADABLE
from workers.thoughts import ThoughtReader, split_thoughts

Answer = dict[str, Any]
STEP_S = 30.0
"""Longest time for an environment's reply."""
FORGET = "/new"
IMAGE = "/image "
PROMPT = "> "


class Chat:
    """A conversation with a model; its replies are shown while they are generated."""

    def __init__(self, folder: Path, *, system: str, max_tokens: int, temperature: float) -> None:
        """Load the model of a folder; temperature 0 means greedy decoding."""
        import torch
        from safetensors import SafetensorError

        from workers.models.classes import model_class
        from workers.models.folder import read_hf_config

        config = read_hf_config(folder)
        architectures = config.architectures or []
        if any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ConfigError(f"{folder} is a {architectures[0]}: it scores texts and cannot chat.")
        self.tokenizer = load_tokenizer(str(folder), "the model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = model_class(config).from_pretrained(
                folder, dtype="auto", trust_remote_code=False
            )
        except (OSError, RuntimeError, SafetensorError, *UNREADABLE) as error:
            raise ConfigError(f"{folder}: cannot load a model from its weights: {error}") from error
        self.model = model.to(device).eval()
        self.first: list[dict[str, Any]] = []
        if system:
            self.first.append({"role": "system", "content": system})
        self.messages = list(self.first)
        self.sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            # these override the folder's generation_config.json
            self.sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def answer(self, text: str) -> str:
        """Print the model's reply to the conversation with this message, and return it.

        Lines `/image PATH` at the beginning of the message are images.
        """
        message, text = self._message(text)
        self.messages.append(message)
        try:
            inputs = self._inputs(text)
        except ConfigError:
            self.messages.pop()
            raise
        tokens = self.generate(inputs)
        reader = ThoughtReader.of(self.tokenizer)
        reply = reader.text_of(tokens)
        if reader.hides:
            reply = split_thoughts(reply, reader.is_open)[1]
        self.messages.append({"role": "assistant", "content": reply})
        return reply

    def generate(self, inputs: Any, **overrides: Any) -> list[int]:
        """Print the model's words while it generates them, and return their token ids.

        `overrides` are arguments of the model's `generate`.
        """
        import torch
        from transformers import TextStreamer

        hides = ThoughtReader.of(self.tokenizer).hides
        words = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=not hides)
        inputs = inputs.to(self.model.device)
        folder = self.tokenizer.name_or_path
        if not inputs["input_ids"].numel():
            raise ConfigError(f"{folder}: the message has no tokens. Check its chat template.")
        try:
            with torch.inference_mode():
                tokens = self.model.generate(
                    **inputs,
                    **{**self.sampling, **overrides},
                    pad_token_id=self.tokenizer.pad_token_id,
                    streamer=words,
                )
        except (RuntimeError, *UNREADABLE) as error:
            raise ConfigError(
                f"{folder}: the model cannot generate: {error}. Check its generation_config.json."
            ) from error
        sampled_ids: list[int] = tokens[0, inputs["input_ids"].shape[1] :].tolist()
        return sampled_ids

    def forget(self) -> None:
        """Remove every message but the system prompt."""
        self.messages = list(self.first)

    def _inputs(self, text: str) -> Any:
        """Return the token ids of the conversation, or without a chat template, of the message."""
        refs = images_of(self.messages)
        if self.tokenizer.chat_template is None:
            if refs:
                raise ConfigError(
                    f"{self.tokenizer.name_or_path} has no chat template, which images need. Add "
                    "chat_template.jinja to the model folder."
                )
            return self.tokenizer(text, return_tensors="pt")
        try:
            text = render_messages(self.messages, self.tokenizer, add_generation_prompt=True)
        except ValueError as error:
            raise ConfigError(f"{self.tokenizer.name_or_path}: {error}") from error
        inputs = self.tokenizer(text, add_special_tokens=False, return_tensors="pt")
        if refs:
            inputs.update(self.image_inputs(inputs["input_ids"], refs))
        return inputs

    def _message(self, text: str) -> tuple[dict[str, Any], str]:
        """Return the user's message, and its text without the images at its beginning."""
        paths = []
        while text.startswith(IMAGE):
            line, _, text = text.partition("\n")
            paths.append(line.removeprefix(IMAGE).strip())
        row: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
        if paths:
            row["images"] = paths
        model, columns = self.tokenizer.name_or_path, ReadColumns(["messages"])
        try:
            row, _ = read_media(row, columns, [Path()], model=model)
        except ValueError as error:
            remedy = "" if paths else f" A line {IMAGE}PATH before the message adds an image."
            raise ConfigError(f"{error}.{remedy}") from error
        message: dict[str, Any] = row["messages"][0]
        return message, text

    def image_inputs(self, ids: Any, refs: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """Return the arguments of `generate` for the images among these tokens."""
        from workers.models.images import ImageInput, image_reader

        images = ImageInput(self.model, image_reader(self.tokenizer.name_or_path))
        numbers = images.of_row(ids[0], refs, "the message")
        return images.arguments({"input_ids": ids}, numbers, ids.device)


def main(arguments: Sequence[str]) -> None:
    """Talk until the input ends."""
    parser = argparse.ArgumentParser("verl-like chat", usage_text(__doc__))
    add = parser.add_argument
    add("model")
    add("--system", default="")
    add("--max-tokens", type=int, default=512)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=None)
    add("--environment", default="")
    add("--tools", nargs="+", default=[])
    add("--kwargs", type=json_object, default={})
    add("--row", type=json_object, default={})
    add("--max-turns", type=int, default=8)
    options = parser.parse_args(arguments)
    if options.max_tokens < 1 or options.temperature < 0:
        raise ConfigError(
            f"--max-tokens={options.max_tokens} --temperature={options.temperature}: the first "
            "must be 1 or more, the second 0 or more."
        )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="verl-like-chat-") as scratch:
        folder, _ = find_loadable(options.model, Path(scratch) / "model")
        chat = Chat(
            folder,
            system=options.system,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
        if options.seed is not None:
            import torch

            torch.manual_seed(options.seed)
        if options.environment or options.tools:
            play(chat, options)
        elif sys.stdin.isatty():
            talk(chat)
        else:
            chat.answer(sys.stdin.read().rstrip("\n"))


def talk(chat: Chat) -> None:
    """Read messages from the terminal until Ctrl-D or Ctrl-C."""
    print(f"{FORGET} starts a new conversation, {IMAGE}PATH adds an image, Ctrl-D ends")
    images = ""
    while True:
        try:
            text = input(PROMPT).strip()
            if text == FORGET:
                chat.forget()
                images = ""
            elif text.startswith(IMAGE):
                images += f"{text}\n"
            elif text:
                message, images = images + text, ""
                try:
                    chat.answer(message)
                except ConfigError as error:
                    if not message.startswith(IMAGE):
                        raise
                    print(error)  # for example, of a path with a typo
        except (EOFError, KeyboardInterrupt):
            print()
            return


def play(chat: Chat, options: argparse.Namespace) -> None:
    """Play one trajectory turn by turn, until it ends or has `--max-turns` turns."""
    tools = [full_path(path) for path in options.tools]
    forms = forms_of(str(chat.tokenizer.chat_template))
    spec = EnvironmentSpec(
        full_path(options.environment), options.kwargs, tools, tool_call_parser=forms
    )
    row, seed = {"prompt": "", **options.row}, options.seed or 0
    if sys.stdin.isatty():
        print("Enter: the model's turn; a text: yours; Ctrl-D ends")
    with closing(EnvironmentHost(spec, STEP_S)) as host:
        players = host.kinds[""].players
        if players:
            raise ConfigError(
                f"--environment={options.environment} has the players {', '.join(players)}, but "
                "chat plays only one. `verl-like check-environment` plays them with your texts, "
                "and `verl-like eval` with the model."
            )
        host.open(0, (seed, seed + 1), row)
        first = _next_answer(host)
        print(f"environment: {first.get('failed') or reply_text(first)}")
        rewards: list[float] = []
        if "failed" not in first:
            trajectory = ChatTrajectory(chat, host, row["prompt"], first)
            for _ in range(options.max_turns):
                answer = trajectory.turn()
                if answer is None:
                    break
                print(f"environment: {answer.get('failed') or reply_text(answer)}", flush=True)
                rewards.append(answer.get("reward", 0.0))
                if answer.get("end") or "failed" in answer:
                    break
    print(f"{len(rewards)} turns, reward {sum(rewards):g}")


class ChatTrajectory:
    """The token ids of a trajectory, which the model and the user extend by turns."""

    def __init__(self, chat: Chat, host: EnvironmentHost, prompt: Any, first: Answer) -> None:
        """Begin with the prompt and the first observation, or with an agent's first request."""
        eos = chat.model.generation_config.eos_token_id
        ends = eos if isinstance(eos, list) else [eos]
        self._stops = sorted({chat.tokenizer.eos_token_id, *ends} - {None})
        self._chat, self._host = chat, host
        self._renderer = TurnRenderer(chat.tokenizer, host.tools, self._stops)
        self._ids: list[int] = []
        self._images: list[Any] = []
        self._most: dict[str, int] = {}
        """The token limit of a turn, if an agent sets it."""
        if "messages" in first:
            self._observe(None, first)
            return
        text = with_refs(first["text"])
        observed = None if text is None else self._renderer.template.escaped(text)
        self._begin(with_observation(prompt, observed))

    def turn(self) -> Answer | None:
        """Return the environment's reply to the next turn, or None if the user ends the chat."""
        tokenizer = self._chat.tokenizer
        text = _user_turn()
        if text is None:
            return None
        last = None
        if text:
            self._ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            print("policy: ", end="", flush=True)
            overrides = {"eos_token_id": self._stops, **self._most}
            sampled_ids = self._chat.generate(self._inputs(), **overrides)
            self._ids += sampled_ids
            last = sampled_ids[-1] if sampled_ids[-1] in self._stops else None
            text = self._renderer.text_of(sampled_ids if last is None else sampled_ids[:-1])
        self._host.say(0, text, **self._renderer.thoughts.details)
        answer = _next_answer(self._host)
        if "messages" in answer:
            self._observe(last, answer)
        return answer

    def _observe(self, last: int | None, answer: Answer) -> None:
        request = answer.get("request", {"extends": True})
        if "tools" in request:
            reject_ids(request)
            self._renderer = self._renderer.with_tools(request["tools"])
            most, limit = self._chat.sampling["max_new_tokens"], request["max_tokens"]
            self._most = {"max_new_tokens": min(most, limit or most)}
        if request["extends"]:
            messages = with_refs(answer["messages"])
            self._ids += self._renderer.between(last, messages)
            self._images += images_of(messages)
        else:
            self._begin(self._renderer.template.escaped(with_refs(request["chat"])))

    def _begin(self, messages: Sequence[Message]) -> None:
        self._ids, self._images = self._renderer.prompt(messages), images_of(messages)

    def _inputs(self) -> Any:
        import torch
        from transformers import BatchEncoding

        ids = torch.tensor([self._ids])
        images = self._chat.image_inputs(ids, self._images) if self._images else {}
        return BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids), **images})


def _user_turn() -> str | None:
    """Return the user's turn; "" if it is the model's turn; None if the user ends the chat."""
    if sys.stdin.isatty():
        try:
            return input(PROMPT).strip()
        except (EOFError, KeyboardInterrupt):
            print()
            return None
    text = sys.stdin.readline().strip()
    if text:
        print(f"{PROMPT}{text}")
    return text


def _next_answer(host: EnvironmentHost) -> Answer:
    while True:
        for _, answer in host.answers(1.0):
            return answer
