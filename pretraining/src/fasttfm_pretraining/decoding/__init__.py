"""Trained models at work: continuations, prompts, answers, attention in a text."""
