"""Shapes of the pre-trained models, and how their text becomes batches."""
