"""Pre-training on documents, distillation of a BERT, and fine-tuning for a task."""
