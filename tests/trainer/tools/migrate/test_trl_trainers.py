"""Losses of translated commands next to those of TRL 1.16's own trainers, on the same batch."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.trainer.tools.check_loss.stand_ins import NOT_INSTALLED
from tests.trainer.tools.migrate.words import composed, translated_whole
from tests.workers.models import vision
from tests.workers.models.architectures import build_tiny, tiny_model_config
from trainer.ppo.advantage_inputs import estimate_advantages
from trainer.ppo.scoring import KLController, apply_kl_penalty
from verl_like.batch.protocol import DataProto
from workers.losses.preference import SFT_LENGTH, measures
from workers.losses.registry import get_policy_loss

pytest.importorskip("trl", reason=NOT_INSTALLED)
pytestmark = pytest.mark.filterwarnings("ignore:You are importing from 'trl.experimental'")
LENGTHS = [(2, 3, 5), (4, 1, 2), (3, 6, 4)]
"""Tokens of the prompt, the chosen and the rejected response of each pair."""


def pairs() -> dict[str, Tensor]:
    """Return a batch of pairs as TRL's collator makes it."""
    width = max(sum(lengths) for lengths in LENGTHS)
    torch.manual_seed(1)
    batch = {}
    for side in (1, 2):
        ids = torch.randint(3, 30, (len(LENGTHS), width))
        mask, labels = torch.zeros_like(ids), torch.full_like(ids, -100)
        for row, lengths in enumerate(LENGTHS):
            end = lengths[0] + lengths[side]
            mask[row, :end] = 1
            labels[row, lengths[0] : end] = ids[row, lengths[0] : end]
        name = ("chosen", "rejected")[side - 1]
        batch |= {f"{name}_input_ids": ids, f"{name}_labels": labels}
        batch[f"{name}_attention_mask"] = mask
    return batch


def loss_of_trl(trainer: Any, config: Any, model: nn.Module, **settings: Any) -> Tensor:
    """Return the loss of a trainer of TRL, which gets the model and the batch of pairs."""
    without = {"__getattr__": lambda trainer, name: None, "__init__": lambda trainer: None}
    bare_trainer = type(trainer.__name__, (trainer,), without)()
    accelerator = SimpleNamespace(device="cpu", gather_for_metrics=lambda tensor: tensor)
    vars(bare_trainer).update({field.name: field.default for field in fields(config)} | settings)
    vars(bare_trainer).update(accelerator=accelerator, pad_token_id=0, padding_value=0)
    loss: Tensor = bare_trainer.get_batch_loss_metrics(model, pairs())[0]
    return loss


def token_log_probs(model: nn.Module, ids: Tensor, mask: Tensor) -> Tensor:
    """Return the log-prob of every token but the first."""
    log_probs = model(input_ids=ids, attention_mask=mask).logits[:, :-1].log_softmax(-1)
    return log_probs.gather(-1, ids[:, 1:, None])[..., 0]


def columns(model: nn.Module) -> dict[str, Tensor]:
    """Return the columns of the batch of pairs that the preference losses read."""
    batch, sums, num_tokens = pairs(), [], []
    for side in ("chosen", "rejected"):
        inside = batch[f"{side}_labels"][:, 1:] != -100
        ids, mask = batch[f"{side}_input_ids"], batch[f"{side}_attention_mask"]
        sums.append((token_log_probs(model, ids, mask) * inside).sum(1))
        num_tokens.append(inside.sum(1))
    lengths = torch.stack(num_tokens, 1).float()
    of_chosen = lengths[:, 0].mean().expand(len(LENGTHS))
    margin = torch.zeros(len(LENGTHS))
    names = {"num_tokens": lengths, "margin": margin, SFT_LENGTH: of_chosen}
    return {"log_probs": torch.stack(sums, 1), **names}


def check_equal(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=1e-6)
    check_gradients(ours, theirs, model)


def check_gradients(ours: Tensor, theirs: Tensor, model: nn.Module) -> None:
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    gradients = [torch.autograd.grad(loss, weights, retain_graph=True) for loss in (ours, theirs)]
    assert any(gradient.abs().max() > 1e-3 for gradient in gradients[0])
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def tiny_model() -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build_tiny(tiny_model_config("llama")).eval()
    return model


@pytest.mark.parametrize(
    "flags", ["", "--cpo_alpha 0.5 --beta 0.3", "--cpo_alpha 0 --label_smoothing 0.1"]
)
def test_cpo_has_trl_s_loss_and_gradient(flags: str) -> None:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    model = tiny_model()
    command = f"python cpo.py --model_name_or_path m --dataset_name a/b {flags}"
    done = translated_whole("trl", command)
    original = {name: float(done.original[name]) for name in flags.replace("--", "").split()[::2]}
    theirs = loss_of_trl(CPOTrainer, CPOConfig, model, **original)
    check_equal(measures(columns(model), composed(done))["loss"].mean(), theirs, model)


def test_orpo_has_trl_s_loss_of_the_odds_and_gradient() -> None:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    model = tiny_model()
    command = "python orpo.py --model_name_or_path m --dataset_name a/b --beta 0.3"
    config = composed(translated_whole("trl", command))
    batch, inputs = pairs(), columns(model)
    ids, mask = batch["chosen_input_ids"], batch["chosen_attention_mask"]
    log_probs, inside = token_log_probs(model, ids, mask), mask[:, 1:]
    sft_of_trl = -(log_probs * inside).sum() / inside.sum()
    sft = -(inputs["log_probs"] / inputs["num_tokens"])[:, 0].mean()
    theirs = loss_of_trl(ORPOTrainer, ORPOConfig, model, beta=0.3)
    ours = measures(inputs, config)["loss"].mean()
    check_equal(ours - sft, theirs - sft_of_trl, model)


def test_rloo_has_trl_s_gradient(tmp_path: Path) -> None:
    """The ratio is of responses in TRL, and of tokens here: only on-policy gradients are equal."""
    from datasets import Dataset
    from trl import RLOOConfig, RLOOTrainer

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [len(ids) + ids[0] % 5 for ids in completion_ids]

    class Recorded(RLOOTrainer):  # type: ignore[misc]
        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            loss = super()._compute_loss(model, inputs)
            steps.append((inputs, loss))
            check(inputs, loss)
            return loss

    steps: list[Any] = []
    model, reference = tiny_model(), tiny_model()
    with torch.no_grad():
        for weight in reference.parameters():
            weight.mul_(1.1)
    reference.save_pretrained(tmp_path)
    model.config._name_or_path = str(tmp_path)  # where the trainer finds its reference
    command = "trl rloo --model_name_or_path m --dataset_name a/b --reward_model_name_or_path r"
    config = composed(translated_whole("trl", f"{command} --beta 0.2 --num_generations 4"))
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm

    def check(inputs: Any, theirs: Tensor) -> None:
        ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
        mask = torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], 1)
        inside, width = inputs["completion_mask"], inputs["completion_mask"].shape[1]
        log_prob = token_log_probs(model, ids, mask)[:, -width:]
        ref = token_log_probs(reference, ids, mask)[:, -width:]
        responses = [
            row[mask > 0].tolist() for row, mask in zip(ids[:, -width:], inside, strict=True)
        ]
        scores = torch.zeros_like(log_prob)
        scores[range(len(responses)), inside.sum(1) - 1] = torch.tensor(reward(responses)).float()
        batch = DataProto.from_dict(
            {
                "token_level_scores": scores,
                "old_log_probs": log_prob.detach(),
                "ref_log_prob": ref.detach(),
                "response_mask": inside,
            },
            {"uid": [str(prompt.tolist()) for prompt in inputs["prompt_ids"]]},
        )
        batch, _ = apply_kl_penalty(batch, KLController(algorithm.kl_ctrl), algorithm.kl_penalty)
        advantages = estimate_advantages(batch, algorithm).batch["advantages"]
        loss = get_policy_loss(actor.policy_loss.loss_mode)
        ours, _ = loss(log_prob.detach(), log_prob, advantages, inside, actor.loss_agg_mode, actor)
        check_gradients(ours, theirs, model)

    tokenizer = vision.tokenizer_with({}, "")
    arguments = RLOOConfig(
        str(tmp_path),
        **{"use_cpu": True, "bf16": False, "report_to": [], "save_strategy": "no", "max_steps": 1},
        **{"per_device_train_batch_size": 8, "num_generations": 4, "max_completion_length": 6},
        **{"beta": 0.2, "gradient_checkpointing": False},
    )
    rows = Dataset.from_list([{"prompt": "a b"}, {"prompt": "c"}])
    Recorded(model, reward, arguments, train_dataset=rows, processing_class=tokenizer).train()
    assert len(steps) == 1
