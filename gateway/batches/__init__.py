"""OpenAI's batches: files and batches in SQLite, of one gateway or of several on one machine."""
