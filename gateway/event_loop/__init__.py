"""Keeping the event loop free: work in turns and on threads, and how long its pieces take."""
