"""usage: verl-like chat MODEL [--system TEXT] [--max-tokens N] [--temperature T]
           [--seed N]

MODEL is a model folder, a run folder (its trained model), or a global_step_N in one. On a terminal
it asks for messages (/new restarts, Ctrl-D ends) and shows the replies while they are generated.
From a pipe the whole input is one message, and only the reply is printed:

  echo "What is 3 + 4?" | verl-like chat runs/sums --max-tokens 4
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from trainer.data.prompt_tokens import written
from trainer.data.prompts import load_tokenizer
from trainer.run_folder.saved_model import find_saved_model
from verl_like.errors import ConfigError
from workers.models.folder import is_on_hub, model_folder

FORGET = "/new"
PROMPT = "> "


class Chat:
    """A conversation with a model; its replies are shown while they are generated."""

    def __init__(self, folder: Path, *, system: str, max_tokens: int, temperature: float) -> None:
        """Load the model of a folder; temperature 0 means greedy decoding."""
        import torch
        from safetensors import SafetensorError
        from transformers import AutoModelForCausalLM

        from workers.models.folder import read_hf_config

        architectures = read_hf_config(folder).architectures or []
        if any(name.endswith("ForSequenceClassification") for name in architectures):
            raise ConfigError(f"{folder} is a {architectures[0]}: it scores texts and cannot chat.")
        self.tokenizer = load_tokenizer(str(folder), "the model")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype="auto", trust_remote_code=False
            )
        except (OSError, ValueError, RuntimeError, SafetensorError) as error:
            raise ConfigError(f"{folder}: no model loads from its weights: {error}") from error
        self.model = model.to(device).eval()
        self.first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self.first)
        self.sampling: dict[str, Any] = {"max_new_tokens": max_tokens, "do_sample": temperature > 0}
        if temperature > 0:
            # these override the folder's generation_config.json
            self.sampling |= {"temperature": temperature, "top_k": 0, "top_p": 1.0}

    def answer(self, text: str, show_on: TextIO) -> str:
        """Return the model's reply to the conversation with this message."""
        import torch

        self.messages.append({"role": "user", "content": text})
        inputs = self._inputs(text).to(self.model.device)
        with torch.inference_mode():
            tokens = self.model.generate(
                **inputs,
                **self.sampling,
                pad_token_id=self.tokenizer.pad_token_id,
                streamer=_streamer(self.tokenizer, show_on),
            )
        sampled = tokens[0, inputs["input_ids"].shape[1] :]
        reply: str = self.tokenizer.decode(sampled, skip_special_tokens=True)
        self.messages.append({"role": "assistant", "content": reply})
        return reply

    def forget(self) -> None:
        """Remove every message but the system prompt."""
        self.messages = list(self.first)

    def _inputs(self, text: str) -> Any:
        """Return the token ids of the conversation, or without a chat template, of the message."""
        if self.tokenizer.chat_template is None:
            return self.tokenizer(text, return_tensors="pt")
        try:
            text = written(self.messages, self.tokenizer, add_generation_prompt=True)
        except ValueError as error:
            raise ConfigError(f"{self.tokenizer.name_or_path}: {error}") from error
        return self.tokenizer(text, add_special_tokens=False, return_tensors="pt")


def _streamer(tokenizer: Any, show_on: TextIO) -> Any:
    """Return a streamer that prints the reply word by word."""
    from transformers import TextStreamer

    class Shown(TextStreamer):  # type: ignore[misc, unused-ignore]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, end="\n" if stream_end else "", file=show_on, flush=True)

    return Shown(tokenizer, skip_prompt=True, skip_special_tokens=True)


def main(arguments: Sequence[str]) -> None:
    """Talk until the input ends."""
    options = _parser().parse_args(arguments)
    if options.max_tokens < 1 or options.temperature < 0:
        raise ConfigError(
            f"--max-tokens={options.max_tokens} is 1 or more, --temperature="
            f"{options.temperature} is 0 or more."
        )
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    with tempfile.TemporaryDirectory(prefix="verl-like-chat-") as scratch:
        folder = Path(options.model)
        if is_on_hub(options.model):
            folder = model_folder(options.model)
        elif not (folder / "config.json").is_file():
            folder = find_saved_model(folder).loadable(Path(scratch) / "model")
        chat = Chat(
            folder,
            system=options.system,
            max_tokens=options.max_tokens,
            temperature=options.temperature,
        )
    if options.seed is not None:
        import torch

        torch.manual_seed(options.seed)
    if sys.stdin.isatty():
        talk(chat)
    else:
        chat.answer(sys.stdin.read().rstrip("\n"), sys.stdout)


def talk(chat: Chat) -> None:
    """Read messages from the terminal until Ctrl-D or Ctrl-C."""
    print(f"{FORGET} starts a new conversation, Ctrl-D ends")
    while True:
        try:
            text = input(PROMPT).strip()
            if text == FORGET:
                chat.forget()
            elif text:
                chat.answer(text, sys.stdout)
        except (EOFError, KeyboardInterrupt):
            print()
            return


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("verl-like chat")
    add = parser.add_argument
    add("model")
    add("--system", default="")
    add("--max-tokens", type=int, default=512)
    add("--temperature", type=float, default=0.0)
    add("--seed", type=int, default=None)
    return parser
