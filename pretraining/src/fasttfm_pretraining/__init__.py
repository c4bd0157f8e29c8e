"""The pre-trained family: GPT and Llama, BERT, ALBERT and ELECTRA, from plain text to a fine-tuned model.

It has the same rooms inside as fasttfm, whose command line finds it by the entry point in pyproject.toml.
"""
