"""Start the cookbook's DPO on pairs in a file: `cookbook_dpo.py MODEL PAIRS.jsonl LOG_PATH`.

The cookbook's own command only takes pairs of the hub.
"""

from __future__ import annotations

import sys

from tinker_cookbook.preference import train_dpo
from tinker_cookbook.preference.dpo_datasets import DPODatasetBuilderFromComparisons
from tinker_cookbook.preference.preference_datasets import ComparisonBuilderFromJsonl
from tinker_cookbook.supervised.types import ChatDatasetBuilderCommonConfig

if __name__ == "__main__":
    model, pairs, log_path = sys.argv[1:]
    renderer = "qwen3_instruct"
    common = ChatDatasetBuilderCommonConfig(
        model_name_for_tokenizer=model, renderer_name=renderer, max_length=256, batch_size=8
    )
    builder = ComparisonBuilderFromJsonl(train_path=pairs)
    train_dpo.main(
        train_dpo.Config(
            log_path=log_path,
            model_name=model,
            recipe_name="dpo",
            renderer_name=renderer,
            dataset_builder=DPODatasetBuilderFromComparisons(
                common_config=common,
                comparison_builder=ComparisonBuilderFromJsonl(train_path=pairs),
            ),
            learning_rate=1e-2,
            max_steps=6,
            save_every=0,
            eval_every=0,
        )
    )
