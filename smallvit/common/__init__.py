"""What every room may use: files, paths, extras, and the settings a process starts with."""
