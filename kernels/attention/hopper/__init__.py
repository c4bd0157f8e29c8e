"""Attention for long rows on sm_90, in Gluon: a warp that copies, two warp groups that multiply."""
