"""Compile cases, a file for each kernel file of the same name."""
