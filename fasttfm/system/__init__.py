"""The operating system: files, folders, locks, processes, signals, memory, and what is read from text."""
