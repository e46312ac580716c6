"""Preference training: DPO and its kin on pairs of responses, KTO on good and bad ones."""
