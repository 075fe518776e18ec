"""What each key used by day: counted per call, kept in SQLite, of one gateway or of several on one machine (ADR 62)."""
