"""OpenAI's API: chat completions, completions, models and tokenize. JSON bodies in, JSON and server-sent events out."""
