"""The pytest plug-in; loaded by entry point."""
