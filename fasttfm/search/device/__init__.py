"""Searches that live on the device: state of fixed shape, a step that the host never waits for."""
