from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.workers.samples import make_batch, started, tiny_config
from verl_like.errors import ConfigError
from workers.config import RewardModelConfig
from workers.models.folder import check_same_tokenizer
from workers.roles.critic import CriticWorker
from workers.roles.reward_model import RewardModelWorker


def scorer(tiny_dir: Path, path: Path) -> RewardModelWorker:
    config = tiny_config(tiny_dir)
    config.reward.model = RewardModelConfig(enable=True, path=str(path), micro_batch_size_per_gpu=2)
    return started(RewardModelWorker, config)


def test_scores_are_the_classifier_s_at_the_last_real_token(
    tiny_dir: Path, classifier: Path
) -> None:
    from transformers import LlamaForSequenceClassification

    batch = make_batch(5)
    scores = scorer(tiny_dir, classifier).compute_rm_score(batch).batch["rm_scores"]
    model = LlamaForSequenceClassification.from_pretrained(classifier)
    for row in range(5):
        tokens = batch.batch["input_ids"][row][batch.batch["attention_mask"][row].bool()]
        expected = torch.zeros(5)
        expected[int(batch.batch["response_mask"][row].sum()) - 1] = model(
            tokens[None]
        ).logits.item()
        torch.testing.assert_close(scores[row], expected, atol=1e-6, rtol=0)


def test_an_empty_response_scores_zero(tiny_dir: Path, classifier: Path) -> None:
    batch = make_batch(3)
    batch.batch["response_mask"][1] = 0
    scores = scorer(tiny_dir, classifier).compute_rm_score(batch).batch["rm_scores"]
    assert (scores != 0).sum(dim=1).tolist() == [1, 0, 1]


def test_a_critic_starts_from_a_reward_model_s_body_and_head(
    tiny_dir: Path, classifier: Path
) -> None:
    config = tiny_config(tiny_dir)
    config.critic.model.path = str(classifier)
    critic, reward = started(CriticWorker, config, 1), scorer(tiny_dir, classifier)
    modules = [dict(worker.engine.module.named_parameters()) for worker in (critic, reward)]
    assert all(torch.equal(tensor, modules[1][name]) for name, tensor in modules[0].items())
    assert modules[0]["score.weight"].abs().max() > 0


def test_a_critic_from_a_classifier_of_several_labels_starts_at_zero(
    tiny_dir: Path, tmp_path: Path
) -> None:
    from transformers import AutoConfig, LlamaForSequenceClassification

    labels = AutoConfig.from_pretrained(tiny_dir / "model", num_labels=3)
    LlamaForSequenceClassification(labels).save_pretrained(tmp_path)
    config = tiny_config(tiny_dir)
    config.critic.model.path = str(tmp_path)
    values = started(CriticWorker, config, 1).compute_values(make_batch(2)).batch["values"]
    assert values.abs().max() == 0


def test_a_critic_reads_the_head_from_pytorch_model_bin(
    tiny_dir: Path, classifier: Path, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    torch.save(load_file(classifier / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_bytes((classifier / "config.json").read_bytes())
    config = tiny_config(tiny_dir)
    config.critic.model.path = str(tmp_path)
    values = started(CriticWorker, config, 1).compute_values(make_batch(2)).batch["values"]
    config.critic.model.path = str(classifier)
    same = started(CriticWorker, config, 1).compute_values(make_batch(2)).batch["values"]
    assert values.equal(same)
    assert values.abs().max() > 0


def test_a_model_without_a_score_head_is_rejected(tiny_dir: Path) -> None:
    with pytest.raises(ConfigError, match="it is not a reward model with one output"):
        scorer(tiny_dir, tiny_dir / "model")


def test_another_tokenizer_than_the_actor_s_is_rejected(tiny_dir: Path, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_dir / "model")
    tokenizer.add_tokens(["~"])
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="1 tokens differ, such as '~'"):
        check_same_tokenizer(str(tmp_path), str(tiny_dir / "model"), "reward_model")
