"""Translations over HTTP: one engine that batches the sentences of all clients, and the pages around it."""
