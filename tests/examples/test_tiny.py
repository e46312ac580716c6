import pyarrow.parquet as pq
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.cli.make_tiny import main
from verl_like.errors import ConfigError
from workers.rewards.functions import default_compute_score


@pytest.fixture(scope="module")
def rows(tiny_dir):
    return [
        row
        for split in ("train", "val")
        for row in pq.read_table(tiny_dir / f"{split}.parquet").to_pylist()
    ]


def test_prompts_are_at_most_sixteen_tokens_after_the_chat_template(tokenizer, rows):
    assert len(rows) == 332
    for row in rows:
        ids = tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True)["input_ids"]
        assert len(ids) <= 16
        assert tokenizer.unk_token_id not in ids


def test_text_survives_the_tokenizer(tokenizer):
    text = "give b, 1 + 2?\n#### 3".replace("+", "-")
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_the_right_letters_have_the_full_score(rows):
    for row in rows:
        truth = row["reward_model"]["ground_truth"]
        assert row["prompt"][0]["content"].endswith(f" {truth}")
        assert default_compute_score(row["data_source"], truth * 5, truth, row["extra_info"]) == 1.0


def test_the_model_of_sums_solves_some_of_them_by_the_rule_of_gsm8k(tmp_path):
    main([str(tmp_path), "--sums", "--num-val", "64"])
    rows = pq.read_table(tmp_path / "val.parquet").to_pylist()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    prompts = tokenizer.apply_chat_template(
        [row["prompt"] for row in rows], add_generation_prompt=True, return_tensors="pt"
    )
    assert tokenizer.unk_token_id not in prompts["input_ids"]
    ids = model.generate(**prompts, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(
        ids[:, prompts["input_ids"].shape[1] :], skip_special_tokens=True
    )
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    scores = [
        default_compute_score("openai/gsm8k", *pair) for pair in zip(texts, truths, strict=True)
    ]
    assert 0.1 < sum(scores) / len(scores) < 0.9


def test_the_same_seed_makes_the_same_files(make_tiny, tiny_dir, tmp_path):
    again = make_tiny.make(tmp_path / "again")
    other = make_tiny.make(tmp_path / "other", seed=1)
    for name in ("train.parquet", "model/model.safetensors"):
        assert (again / name).read_bytes() == (tiny_dir / name).read_bytes()
        assert (other / name).read_bytes() != (tiny_dir / name).read_bytes()


@pytest.mark.parametrize("option", ["--num-train=0", "--num-layers=-1", "--hidden-size=12"])
def test_impossible_sizes_are_rejected(option, tmp_path):
    with pytest.raises(ConfigError, match=f"{option}: it must be"):
        main([str(tmp_path), option])
