"""Attention for long rows on sm_90, in Gluon, warp-specialized: one producer warp, two consumer warp groups."""
