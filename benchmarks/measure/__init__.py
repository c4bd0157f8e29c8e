"""Timing, checking, and records."""
