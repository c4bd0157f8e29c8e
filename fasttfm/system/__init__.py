"""The machine: files, folders, locks, processes, signals, memory, clocks, CUDA graphs, and what is read from text."""
