"""The ledger of machine code: what every kernel's loops ask of a chip's units, counted without a device."""
