"""What a device allows: rooflines, machine code, old chips."""
