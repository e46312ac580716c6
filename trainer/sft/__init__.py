"""Supervised fine-tuning: a language-model loss on texts, responses or chats."""
