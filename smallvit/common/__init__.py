"""Utilities for every package: files, paths, extras and process settings."""
