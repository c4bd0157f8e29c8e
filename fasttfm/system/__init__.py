"""Operating system and machine: files, folders, locks, processes, signals, memory, timing, CUDA graphs, parsing."""
