"""Inference: continuations, prompts, answers, attention maps of a text."""
