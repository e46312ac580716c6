"""Preference training: DPO and similar losses on pairs of responses, KTO on labeled responses."""
