"""What a device allows: by machine code; old chips."""
