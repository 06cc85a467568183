"""What every package may use: files, paths, extras, and the settings of a process."""
