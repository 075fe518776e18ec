"""The endpoints of OpenAI's API: they read a body, open a call and send its answer."""
