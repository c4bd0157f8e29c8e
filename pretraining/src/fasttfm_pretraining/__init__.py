"""The pre-trained family: GPT and Llama, BERT, ALBERT and ELECTRA, from plain text to a fine-tuned model.

Its packages mirror those of fasttfm, whose command line finds it through the entry point in pyproject.toml.
"""
