"""Losses of actor and critic as pure functions of tensors and a mask."""
