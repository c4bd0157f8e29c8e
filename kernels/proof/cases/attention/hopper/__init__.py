"""Compile cases of attention/hopper, a file for each kernel file of the same name."""
