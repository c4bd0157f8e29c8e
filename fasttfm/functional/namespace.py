"""The namespace of torch.ops that the operators are registered in."""

NAMESPACE = "fasttfm"
"""A package for Hugging Face's hub (scripts/hub) has another for each build, so that two live in one process."""
