"""Hugging Face's folders of GPT, Llama and BERT's family, read and written."""
