"""The pre-trained family: GPT and Llama, BERT, ALBERT and ELECTRA, from plain text to a fine-tuned model.

A room of its own, with the same rooms inside as the core. The core reaches it through fasttfm.kinds alone.
"""
