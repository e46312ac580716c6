r"""usage: verl-like make-tiny DIR [--sums | --images] [--seed N] [--num-train N]
           [--num-val N] [--hidden-size N] [--num-layers N]

Writes a tiny model to DIR/model, and prompts to DIR/train.parquet and
DIR/val.parquet. To train it:

  verl-like make-tiny tiny
  verl-like ppo trainer.backend=local actor_rollout_ref.model.path=tiny/model \
      data.train_files=tiny/train.parquet data.val_files=tiny/val.parquet \
      data.max_prompt_length=16 data.max_response_length=8 \
      data.train_batch_size=16 actor_rollout_ref.actor.ppo_mini_batch_size=16 \
      trainer.total_training_steps=20

Without options, the model is a Llama with random weights and a token per
character. Each prompt asks for a letter; the reward is the fraction of that
letter in the response.

  --sums         sums instead, such as "What is 3 + 4?", in GSM8K's format; the
                 model already solves about a third of them
  --images       a Qwen2-VL with random weights, and prompts with a picture of
                 the letter (DIR/pictures); the rows also have messages, for SFT
  --num-train    number of training prompts (default: 300)
  --num-val      number of validation prompts (default: 32)
  --hidden-size  width of the model, a multiple of 8 (default: 64)
  --num-layers   layers of the model (default: 2)
  --seed         seed of the weights and the prompts (default: 0)
"""

from __future__ import annotations

import argparse
import random
import string
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from verl_like.errors import ConfigError
from verl_like.files import why_not_writable
from verl_like.terminal import usage_text

NUM_HEADS = 4
LETTERS = "abcd"
WORDS = ("say", "write", "print", "give")
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>", "<user>", "<assistant>")
LARGEST_NUMBER = 5
SUM_WORDS = ("What", " is", " +", "?", "####", *(f" {n}" for n in range(1, 2 * LARGEST_NUMBER + 1)))
SUM_PATTERN = r"#+| ?(?:\w+|\W)"
CHARACTERS = string.ascii_lowercase + string.digits + " .,?!#-\n"
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<user>' if message.role == 'user' else '<assistant>' }}{{ message.content }}"
    "{{ eos_token if message.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(words: Iterable[str] = CHARACTERS, pattern: str = r"[\s\S]") -> Any:
    """Return a tokenizer with a chat template and a token per word; `pattern` finds words."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {token: index for index, token in enumerate((*SPECIAL, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        unk_token="<unk>",
        additional_special_tokens=["<user>", "<assistant>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, seed: int = 0, hidden_size: int = 64, num_layers: int = 2) -> Any:
    """Return a Llama with random weights that fits the tokenizer.

    Args:
        tokenizer: sets the size of the vocabulary.
        seed: seed of the weights.
        hidden_size: width of the layers.
        num_layers: number of layers.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def fit(model: Any, tokens: Any, labels: Any, *, until: float = 0.0, steps: int = 1000) -> None:
    """Train a model on 32 rows of equal length per step, until the loss is below a limit.

    Args:
        model: a causal language model of transformers.
        tokens: token ids [rows, T].
        labels: token ids [rows, T]; a label of -100 is not learned.
        until: stop when the loss is below this number.
        steps: largest number of steps.
    """
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows = torch.arange(step * 32, (step + 1) * 32) % len(tokens)
        loss = model(input_ids=tokens[rows], labels=labels[rows]).loss
        if loss < until:
            break
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def fit_answers(model: Any, tokenizer: Any, prompts: Sequence[Any], answers: Sequence[str]) -> None:
    """Train until about a third of the sampled responses are right.

    Args:
        model: a causal language model of transformers.
        tokenizer: its tokenizer, with a chat template.
        prompts: chats.
        answers: the right response to each prompt; all have equally many tokens.
    """
    import torch

    chats = tokenizer.apply_chat_template(prompts, add_generation_prompt=True, tokenize=False)
    texts = [chat + answer for chat, answer in zip(chats, answers, strict=True)]
    rows = tokenizer(texts, add_special_tokens=False)["input_ids"]
    tokens = torch.tensor([[*row, tokenizer.eos_token_id] for row in rows])
    labels = tokens.clone()
    num_answer_tokens = len(tokenizer(answers[0], add_special_tokens=False)["input_ids"]) + 1
    labels[:, :-num_answer_tokens] = -100
    fit(model, tokens, labels, until=0.4)


def make_rows(num_rows: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return rows in verl's schema; the letters occur about equally often."""
    rng = random.Random(f"{seed}-{split}")
    letters = [LETTERS[index % len(LETTERS)] for index in range(num_rows)]
    rng.shuffle(letters)
    return [
        _row("verl_like/tiny_letters", "letters", f"{rng.choice(WORDS)} {letter}", letter, split, i)
        for i, letter in enumerate(letters)
    ]


def make_sums(num_rows: int, split: str, seed: int = 0) -> list[dict[str, Any]]:
    """Return sums in verl's schema; the built-in rule for GSM8K scores them."""
    rng = random.Random(f"{seed}-{split}")
    rows = []
    for index in range(num_rows):
        a, b = rng.randint(1, LARGEST_NUMBER), rng.randint(1, LARGEST_NUMBER)
        text = f"What is {a} + {b}?"
        rows.append(_row("openai/gsm8k", "math", text, str(a + b), split, index))
    return rows


def _row(
    source: str, ability: str, text: str, answer: str, split: str, index: int
) -> dict[str, Any]:
    """Return a row in verl's schema."""
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": text}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index},
    }


def make(
    folder: str | Path,
    *,
    sums: bool = False,
    images: bool = False,
    seed: int = 0,
    num_train: int = 300,
    num_val: int = 32,
    **size: int,
) -> Path:
    """Write model, tokenizer and both parquet files into `folder`; `size` goes to `make_model`.

    The files have `num_train` and `num_val` prompts, drawn with `seed`. The prompts ask for
    a letter, or with `sums` for a sum; with `images`, they show the letter. Return `folder`.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if images:
        from trainer.cli import tiny_vision

        tiny_vision.write_vision_model(folder / "model", make_tokenizer(), seed, **size)
    else:
        tokenizer = make_tokenizer(SUM_WORDS, SUM_PATTERN) if sums else make_tokenizer()
        tokenizer.save_pretrained(folder / "model")
        model = make_model(tokenizer, seed, **size)
        if sums:
            rows = make_sums(num_train, "train", seed)
            answers = [f"#### {row['reward_model']['ground_truth']}" for row in rows]
            fit_answers(model, tokenizer, [row["prompt"] for row in rows], answers)
        model.save_pretrained(folder / "model")
    for split, num_rows in (("train", num_train), ("val", num_val)):
        if images:
            rows = tiny_vision.make_picture_rows(folder, num_rows, split, LETTERS, seed)
        else:
            rows = (make_sums if sums else make_rows)(num_rows, split, seed)
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}.parquet")
    return folder


def main(arguments: Sequence[str]) -> None:
    """Run `make` from the command line."""
    parser = argparse.ArgumentParser("verl-like make-tiny", usage_text(__doc__))
    parser.add_argument("folder", metavar="DIR")
    tasks = parser.add_mutually_exclusive_group()
    tasks.add_argument("--sums", action="store_true")
    tasks.add_argument("--images", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--num-train", type=int, default=300)
    parser.add_argument("--num-val", type=int, default=32)
    parser.add_argument("--hidden-size", type=int, default=64)
    parser.add_argument("--num-layers", type=int, default=2)
    args = vars(parser.parse_args(arguments))
    for name in ("num_train", "num_val", "num_layers"):
        if args[name] < 1:
            raise ConfigError(f"--{name.replace('_', '-')}={args[name]}: it must be above 0.")
    if args["hidden_size"] < 1 or args["hidden_size"] % (2 * NUM_HEADS):
        raise ConfigError(
            f"--hidden-size={args['hidden_size']}: it must be a multiple of {2 * NUM_HEADS}, for "
            f"{NUM_HEADS} heads of an even size each."
        )
    problem = why_not_writable(Path(args["folder"]))
    if problem:
        raise ConfigError(f"{args['folder']} cannot be written: {problem}. Choose another folder.")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    folder = make(args.pop("folder"), **args)
    print(f"wrote {folder}/model, {folder}/train.parquet, {folder}/val.parquet")
