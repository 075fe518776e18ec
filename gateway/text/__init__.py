"""Between text and tokens: tokenizers, chat templates, the text of an answer."""
