"""The chips whose PTX the tests of this folder execute."""

CHIPS = ("sm_60", "sm_75", "sm_80", "sm_90")
