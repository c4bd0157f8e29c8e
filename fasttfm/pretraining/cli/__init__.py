"""The commands lm, mlm and finetune, and the verb distill bert."""
