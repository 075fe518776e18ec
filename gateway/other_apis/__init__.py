"""APIs of others over the same requests and answers: OpenAI's Responses, Anthropic's Messages."""
