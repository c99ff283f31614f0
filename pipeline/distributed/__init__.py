"""Ranks of a run: rank and device of this process, launchers, signals, exit statuses, and the watchdog."""
