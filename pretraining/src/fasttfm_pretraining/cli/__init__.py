"""The commands lm, mlm and finetune, and the verbs of distill for BERTs."""
