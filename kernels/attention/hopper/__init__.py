"""Attention for long rows on sm_90, in Gluon: warp-specialized, with one copying warp and two computing warp groups."""
