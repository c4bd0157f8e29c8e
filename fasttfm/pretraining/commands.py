"""The commands of this room, for the command line: its table is read before anything of the room is imported."""

COMMANDS = {
    "lm": ("fasttfm.pretraining.cli.lm", "train, evaluate and run a GPT or Llama"),
    "mlm": ("fasttfm.pretraining.cli.mlm", "train and evaluate a BERT, ALBERT or ELECTRA"),
    "finetune": ("fasttfm.pretraining.cli.finetune", "fine-tune for answers, choices or classes"),
}
"""Command -> (module, the line that `fasttfm --help` shows)."""

VERBS = {"distill": "fasttfm.pretraining.cli.distill"}
"""Command of the core -> module with a table VERBS of further verbs."""

LESS_MEMORY = {
    "finetune": "give a smaller --max-tokens (and a larger --update-freq), or a smaller --row-length",
    "lm": "give a smaller --max-tokens (and a larger --update-freq), or a smaller model",
    "mlm": "give a smaller --max-tokens (and a larger --update-freq), or a smaller model",
}
"""Command -> what makes it need less memory."""
