"""Search on a device: state of fixed shape, and steps that the host never waits for."""
